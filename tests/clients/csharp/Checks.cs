// Calls each verb of the C# client as an author would, and each error on purpose.
// Checks.exe HOST PORT single|agents|reconnect|large|refused|messagepack TOKEN [tls]

using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using Envbus;
using Map = System.Collections.Generic.Dictionary<string, object>;

static class Checks
{
    static readonly double[] Observation = { 0, 0.5, -1, 2 }, Silence = { 99, 0, 0, 0 }, Failing = { 98, 0, 0, 0 };

    static void Check(bool condition, string what)
    {
        if (!condition) throw new InvalidOperationException(what);
    }

    static void Equal(object found, object expected)
    {
        Check(Text(found) == Text(expected), "found " + Text(found) + ", expected " + Text(expected));
    }

    static string Text(object value)
    {
        return BitConverter.ToString(MessagePack.Pack(value));
    }

    static string Rejected<T>(Action call) where T : Exception
    {
        try
        {
            call();
        }
        catch (T error)
        {
            return error.Message;
        }
        throw new InvalidOperationException("no " + typeof(T) + " was thrown");
    }

    static void Single(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            Equal(client.Bridge["multi_agent"], false);
            Equal(client.Bridge["policy_ids"], new[] { "default_policy" });
            Equal(((Map)client.Bridge["observation_space"])["space"], "Box");

            Equal(client.StartEpisode("own"), "own");
            Rejected<EpisodeAlreadyStartedException>(() => client.StartEpisode("own"));
            Equal(client.GetAction("own", Observation), 0);
            var info = new Map { { "level", "é" }, { "lives", new object[] { 3, -70000, 1L << 40, null, true } } };
            client.LogReturns("own", 1.5, info);
            client.LogReturns("own", 2);
            Equal(client.GetAction("own", new List<float> { 0, 0, 1, 0 }), 1);
            client.LogAction("own", Observation, 1);
            client.LogReturns("own", -0.25f);
            client.EndEpisode("own", Observation);
            Rejected<EpisodeFinishedException>(() => client.GetAction("own", Observation));
            Rejected<EpisodeFinishedException>(() => client.StartEpisode("own"));
            Rejected<EpisodeNotFoundException>(() => client.GetAction("strange", Observation));

            string cut = client.StartEpisode("cut", trainingEnabled: false);
            Rejected<SpaceMismatchException>(() => client.GetAction(cut, new[] { 1, 2, 3 }));
            Check(Rejected<EpisodeException>(() => client.LogAction(cut, Observation, 2)).Contains("expected Discrete(2)"), "space");
            Rejected<AnswerTimeoutException>(() => client.GetAction(cut, Silence, TimeSpan.FromMilliseconds(200)));
            Check(Rejected<RemoteException>(() => client.GetAction(cut, Failing)).Contains("ArithmeticError: the policy fails"), "remote");
            Equal(client.GetAction(cut, Observation), 0);
            client.EndEpisode(cut, Observation, truncated: true);

            // From several threads, an episode each.
            Parallel.For(0, 8, index =>
            {
                string episode = client.StartEpisode();
                Equal(client.GetAction(episode, new double[] { 0, 0, index % 2 == 0 ? 1 : -1, 0 }), 1 - index % 2);
                client.EndEpisode(episode, Observation);
            });
            client.Heartbeat();
            client.Dispose();
            Rejected<ConnectionLostException>(() => client.StartEpisode());
        }
    }

    static void Agents(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            Equal(client.Bridge["multi_agent"], true);
            string episode = client.StartEpisode("team");
            var left = new[] { 0, 0, 1, 0 };
            var right = new[] { 0, 0, -1, 0 };
            Equal(client.GetAction(episode, new Map { { "left", left }, { "right", right } }), new Map { { "left", 1 }, { "right", 0 } });
            client.LogReturns(episode, new Dictionary<string, double> { { "left", 1 }, { "right", 2 } },
                              new Map { { "left", new Map { { "hit", true } } } }, new Map { { "left", true } });
            Equal(client.GetAction(episode, new Map { { "right", right } }), new Map { { "right", 0 } });
            client.LogReturns(episode, new Map { { "right", 4 } });
            client.EndEpisode(episode, new Map { { "right", right } }, truncateds: new Map { { "right", true } });
        }
    }

    // The gateway is killed when "ready" is printed: the question that is in flight is asked again.
    static void Reconnect(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode("survivor");
            client.GetAction(episode, Observation);
            Console.WriteLine("ready");
            Equal(client.GetAction(episode, new[] { 97, 0, 1, 0 }), 1);
            client.LogReturns(episode, 3);
            Equal(client.GetAction(episode, Observation), 0);
            Equal(client.Bridge["episodes"], new[] { "survivor" });
            client.EndEpisode(episode, Observation);
        }
    }

    // Sleeps for longer than the bridge bears: the client is forgotten, comes back, and goes on.
    static void Pause(string host, int port, Options options)
    {
        options.Heartbeat = TimeSpan.FromMilliseconds(200);
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode("sleeper");
            Thread.Sleep(1900);
            client.LogReturns(episode, 3);
            for (int i = 0; i < 12; i++)
            {
                Thread.Sleep(100);
                client.Heartbeat();
            }
            Equal(client.GetAction(episode, Observation), 0);
            client.EndEpisode(episode, Observation);
        }
    }

    // The second action is lost on its way: the client says that it did not take it.
    static void Late(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode("late");
            Equal(client.GetAction(episode, Observation), 0);
            Rejected<AnswerTimeoutException>(() => client.GetAction(episode, Observation, TimeSpan.FromSeconds(1)));
            client.LogReturns(episode, 5);
            Equal(client.GetAction(episode, Observation), 0);
            client.LogReturns(episode, 1);
            Equal(client.GetAction(episode, Observation), 0);
            client.EndEpisode(episode, Observation);
        }
    }

    // The first rewards never come: the step that they are of is no row.
    static void Lost(string host, int port, Options options)
    {
        options.Timeout = TimeSpan.FromSeconds(3);  // a busy machine takes its time to connect
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode("lost");
            Equal(client.GetAction(episode, Observation), 0);
            Rejected<AnswerTimeoutException>(() => client.LogReturns(episode, 5));
            client.LogReturns(episode, 1);
            Equal(client.GetAction(episode, Observation), 0);
            client.EndEpisode(episode, Observation);
        }
    }

    // The bridge is stopped when "ready" is printed: who waits is told at once.
    static void Stopped(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode();
            Console.WriteLine("ready");
            Rejected<ConnectionLostException>(() => client.GetAction(episode, Silence));
            // On a busy machine the time is over before Mono is told that nobody listens there.
            Rejected<EnvbusException>(() => client.GetAction(episode, Observation, TimeSpan.FromSeconds(0.5)));
        }
    }

    // The bridge is killed when "ready" is printed, and another one is at its address.
    static void Replaced(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            string old = client.StartEpisode();
            Console.WriteLine("ready");
            Rejected<EpisodeNotFoundException>(() => client.GetAction(old, Silence));
            string episode = client.StartEpisode("next");
            Equal(client.GetAction(episode, Observation), 0);
            client.EndEpisode(episode, Observation);
        }
    }

    // Pictures of 320 x 240 as bytes and as numbers; and what is over the gateway's limit.
    static void Large(string host, int port, Options options)
    {
        using (var client = new Client(host, port, options))
        {
            string episode = client.StartEpisode("pictures");
            Equal(client.GetAction(episode, new byte[240 * 320 * 3]), 0);
            var info = new Map { { "text", new string('x', 5000000) } };
            string told = Rejected<MessageTooLargeException>(() => client.LogReturns(episode, 1, info));
            Check(told.Contains("LogReturns: a message of 5000") && told.EndsWith("bytes is over the gateway's limit of 4194304"), told);
            var picture = Enumerable.Repeat(Enumerable.Repeat(new[] { 255, 128, 0 }, 320).ToArray(), 240).ToArray();
            Equal(client.GetAction(episode, picture), 0);
            client.EndEpisode(episode, new byte[240 * 320 * 3]);
        }
    }

    static void Refused(string host, int port, Options options)
    {
        Check(Rejected<RefusedException>(() => new Client(host, port, options)).Contains("token is wanted"), "no token");
        options.Token = "guess";
        Check(Rejected<RefusedException>(() => new Client(host, port, options)).Contains("token is wrong"), "wrong token");
        options.Timeout = TimeSpan.FromSeconds(2); // for so long it would wait for a bridge
        Rejected<ConnectionLostException>(() => new Client(host, 1, options));
        Rejected<ConnectionLostException>(() => new Client("no.such.host.invalid", port, options));
    }

    // Nothing is waited for.
    static void Untrusted(string host, int port, Options options)
    {
        options.ValidateCertificate = (sender, certificate, chain, errors) => false;
        Rejected<RefusedException>(() => new Client(host, port, options));
    }

    // Who is there sends what cannot be read, and leaves the connection open.
    static void Nonsense(string host, int port, Options options)
    {
        Rejected<EnvbusException>(() => new Client(host, port, options));
    }

    // Who is there announces 4 GB and sends without end.
    static void Huge(string host, int port, Options options)
    {
        Rejected<RefusedException>(() => new Client(host, port, options));
    }

    // Who is there sends late answers without end.
    static void Flood(string host, int port, Options options)
    {
        options.Timeout = TimeSpan.FromSeconds(2);  // a busy machine takes its time to connect
        Rejected<AnswerTimeoutException>(() => new Client(host, port, options));
    }

    // Who is there fails the first request with an error whose name all objects have.
    static void Failed(string host, int port, Options options)
    {
        Rejected<RemoteException>(() => new Client(host, port, options));
    }

    // Who is there answers the first request with nil.
    static void Nil(string host, int port, Options options)
    {
        Rejected<RefusedException>(() => new Client(host, port, options));
    }

    // Who is there says nothing, before or after TLS, or too slowly.
    static void Mute(string host, int port, Options options)
    {
        options.Timeout = TimeSpan.FromSeconds(0.5);
        Rejected<AnswerTimeoutException>(() => new Client(host, port, options));
    }

    static void Messages()
    {
        var values = new object[] {
            null, true, false, 0, 127, 128, 255, 256, 65535, 65536, uint.MaxValue, 1L << 32, -1, -32, -33,
            -128, short.MinValue, short.MinValue - 1, int.MinValue, int.MinValue - 1L, long.MinValue, long.MaxValue, ulong.MaxValue,
            0.1, -1e300, double.PositiveInfinity, "", "ü", new string('x', 31), new string('x', 40), new string('x', 300),
            new string('x', 70000), new byte[300], new byte[70000], new object[20], new object[70000], new Map(),
            Enumerable.Range(0, 70000).ToDictionary(i => i.ToString(), i => (object)i), new Map { { "a", new Map { { "b", 1 } } } },
        };
        foreach (object value in values) Equal(MessagePack.Unpack(MessagePack.Pack(value)), value);
        Equal(MessagePack.Unpack(MessagePack.Pack(0.5f)), 0.5);
        foreach (var pair in new Dictionary<int, int> { { 127, 1 }, { 128, 2 }, { 255, 2 }, { 256, 3 }, { -33, 3 }, { 65536, 5 }, { -32769, 5 } })
            Equal(MessagePack.Pack(pair.Key).Length, pair.Value);
        var packed = MessagePack.Pack(new Map { { "a", new object[] { "text", 1.5, 70000 } }, { "b", new string('x', 40) } });
        for (int size = 0; size < packed.Length; size++)
            Rejected<EnvbusException>(() => MessagePack.Unpack(packed.Take(size).ToArray()));
        Rejected<EnvbusException>(() => MessagePack.Unpack(new byte[] { 0xc7, 1, 2, 3 }));
        Rejected<EnvbusException>(() => MessagePack.Unpack(new byte[] { 0xdd, 0xff, 0xff, 0xff, 0xff }));
        Rejected<EnvbusException>(() => MessagePack.Unpack(Enumerable.Repeat((byte)0x91, 1000).ToArray()));
        Rejected<EnvbusException>(() => MessagePack.Pack(new object()));
    }

    static int Main(string[] args)
    {
        var options = new Options { Token = args[3], Tls = args.Length > 4 };
        // The test's certificate is its own authority.
        options.ValidateCertificate = (sender, certificate, chain, errors) => certificate.Subject == "CN=localhost";
        int port = int.Parse(args[1]);
        switch (args[2])
        {
            case "single": Single(args[0], port, options); break;
            case "agents": Agents(args[0], port, options); break;
            case "reconnect": Reconnect(args[0], port, options); break;
            case "pause": Pause(args[0], port, options); break;
            case "late": Late(args[0], port, options); break;
            case "lost": Lost(args[0], port, options); break;
            case "stopped": Stopped(args[0], port, options); break;
            case "replaced": Replaced(args[0], port, options); break;
            case "large": Large(args[0], port, options); break;
            case "refused": Refused(args[0], port, options); break;
            case "untrusted": Untrusted(args[0], port, options); break;
            case "nonsense": Nonsense(args[0], port, options); break;
            case "huge": Huge(args[0], port, options); break;
            case "failure": Failed(args[0], port, options); break;
            case "nil": Nil(args[0], port, options); break;
            case "mute": Mute(args[0], port, options); break;
            case "flood": Flood(args[0], port, options); break;
            case "messagepack": Messages(); break;
            default: throw new ArgumentException(args[2]);
        }
        Console.WriteLine("passed: " + args[2]);
        return 0;
    }
}
