// CartPoles that live in C#: mcs CartPole.cs Envbus.cs
//                            mono CartPole.exe HOST PORT [episodes] [token] [games at once]

using System;
using System.Collections.Generic;
using System.Threading;

/// The physics of Gymnasium's CartPole-v1: a pole on a cart, pushed left (0) or right (1).
class CartPole
{
    const double PoleMass = 0.1, Mass = 1.1, HalfLength = 0.5, TimeStep = 0.02;
    const double MaxAngle = 12 * 2 * Math.PI / 360;

    readonly Random random = new Random(Guid.NewGuid().GetHashCode()); // the clock is the same for all games
    double x, speed, angle, spin;
    int steps;

    public double Reward { get { return 1.0; } }
    public bool Terminated { get; private set; }
    public bool Truncated { get; private set; }
    public double[] Observation { get { return new[] { x, speed, angle, spin }; } }

    public void Reset()
    {
        Func<double> around = () => random.NextDouble() * 0.1 - 0.05;
        x = around();
        speed = around();
        angle = around();
        spin = around();
        steps = 0;
        Terminated = Truncated = false;
    }

    public void Step(long action)
    {
        double force = action == 1 ? 10.0 : -10.0, cos = Math.Cos(angle), sin = Math.Sin(angle);
        double push = (force + PoleMass * HalfLength * spin * spin * sin) / Mass;
        double turn = (9.8 * sin - cos * push) / (HalfLength * (4.0 / 3.0 - PoleMass * cos * cos / Mass));
        double pull = push - PoleMass * HalfLength * turn * cos / Mass;
        x += TimeStep * speed;
        speed += TimeStep * pull;
        angle += TimeStep * spin;
        spin += TimeStep * turn;
        steps += 1;
        Terminated = Math.Abs(x) > 2.4 || Math.Abs(angle) > MaxAngle;
        Truncated = !Terminated && steps >= 500;
    }
}

static class Program
{
    static int episodes = 10, lastEpisode;

    /// Play until there were so many episodes, of all games together. Return whether all went well.
    static bool Play(string host, int port, Envbus.Options options)
    {
        int process = System.Diagnostics.Process.GetCurrentProcess().Id, number;
        var env = new CartPole();
        try
        {
            using (var client = new Envbus.Client(host, port, options))
            {
                while ((number = Interlocked.Increment(ref lastEpisode)) <= episodes)
                {
                    string episode = client.StartEpisode("csharp-" + process + "-" + number);
                    int steps = 0;
                    for (env.Reset(); !env.Terminated && !env.Truncated; steps++)
                    {
                        env.Step((long)client.GetAction(episode, env.Observation));
                        client.LogReturns(episode, env.Reward);
                    }
                    client.EndEpisode(episode, env.Observation, env.Truncated);
                    Console.WriteLine("episode " + episode + ": " + steps + " steps");
                }
            }
            return true;
        }
        catch (Envbus.EnvbusException error)
        {
            Console.Error.WriteLine("cartpole: " + error.Message);
            return false;
        }
    }

    static int Main(string[] args)
    {
        if (args.Length < 2)
        {
            Console.Error.WriteLine("usage: CartPole HOST PORT [episodes] [token] [games at once]");
            return 2;
        }
        if (args.Length > 2) episodes = int.Parse(args[2]);
        var options = new Envbus.Options { Name = "cartpole-csharp", Token = args.Length > 3 ? args[3] : "" };
        int games = args.Length > 4 ? int.Parse(args[4]) : 1;
        bool well = true;
        var threads = new List<Thread>(); // a client makes one call at a time: one for each game
        for (int game = 0; game < games; game++)
        {
            threads.Add(new Thread(() => { if (!Play(args[0], int.Parse(args[1]), options)) well = false; }));
            threads[game].Start();
        }
        foreach (var thread in threads) thread.Join();
        return well ? 0 : 1;
    }
}
