// A client of an envbus bridge: a simulator drives itself and asks for actions.
//
// One file, .NET Standard 2.0 (Unity, Godot, .NET, Mono), no packages. README.md shows how to use
// it; docs/wire-protocol.md, sections 10 and 11, is what it speaks.

using System;
using System.Collections;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Net.Security;
using System.Net.Sockets;
using System.Security.Authentication;
using System.Text;
using System.Threading;

namespace Envbus
{
    // --- errors ------------------------------------------------------------------------------

    /// <summary>Base of all that is thrown here.</summary>
    public class EnvbusException : Exception { public EnvbusException(string message) : base(message) { } }

    /// <summary>There was no connection until the time was over, or the bridge has ended.</summary>
    public class ConnectionLostException : EnvbusException { public ConnectionLostException(string message) : base(message) { } }

    /// <summary>Refused at once because a limit is reached; later there may be room.</summary>
    public class OverloadedException : ConnectionLostException { public OverloadedException(string message) : base(message) { } }

    /// <summary>No answer came in time.</summary>
    public class AnswerTimeoutException : EnvbusException { public AnswerTimeoutException(string message) : base(message) { } }

    /// <summary>The bridge, or the gateway before it, does not understand or does not want this client.</summary>
    public class RefusedException : EnvbusException { public RefusedException(string message) : base(message) { } }

    /// <summary>A call is larger than the gateway takes; the message says its size and the limit.</summary>
    public class MessageTooLargeException : RefusedException { public MessageTooLargeException(string message) : base(message) { } }

    /// <summary>A call does not fit its episode, which goes on as it was.</summary>
    public class EpisodeException : RefusedException { public EpisodeException(string message) : base(message) { } }

    public class EpisodeNotFoundException : EpisodeException { public EpisodeNotFoundException(string message) : base(message) { } }
    public class EpisodeAlreadyStartedException : EpisodeException { public EpisodeAlreadyStartedException(string message) : base(message) { } }
    public class EpisodeFinishedException : EpisodeException { public EpisodeFinishedException(string message) : base(message) { } }
    public class EpisodeBusyException : EpisodeException { public EpisodeBusyException(string message) : base(message) { } }
    public class EpisodeLostException : EpisodeException { public EpisodeLostException(string message) : base(message) { } }

    /// <summary>An observation or action is outside its space; the message says what was expected.</summary>
    public class SpaceMismatchException : EpisodeException { public SpaceMismatchException(string message) : base(message) { } }

    /// <summary>This client was away for too long; its episodes are over.</summary>
    public class SessionLostException : RefusedException { public SessionLostException(string message) : base(message) { } }

    /// <summary>Something failed at the other side, for example the policy.</summary>
    public class RemoteException : EnvbusException { public RemoteException(string message) : base(message) { } }

    // --- the client --------------------------------------------------------------------------

    public class Options
    {
        public string Name = "simulator";
        public string Token = "";
        /// <summary>For each call, unless it says otherwise, and to connect.</summary>
        public TimeSpan Timeout = TimeSpan.FromSeconds(60);
        /// <summary>A minute at most: after four times that without a call the bridge takes this client for
        /// hung, and its episodes begin to wait for the lease.</summary>
        public TimeSpan Heartbeat = TimeSpan.FromSeconds(60);
        public bool Tls = false;
        /// <summary>Who is trusted with TLS; null: whom the system trusts.</summary>
        public RemoteCertificateValidationCallback ValidateCertificate = null;
    }

    /// <summary>
    /// A session with a bridge, over one TCP connection at a time. Used by any thread; calls wait for
    /// their answers, and for each other. A call whose connection is lost connects again and asks
    /// again; the bridge answers each question once.
    /// </summary>
    /// <remarks>
    /// Values are null, bool, numbers, string, byte[], arrays and lists (nested for matrices), and
    /// dictionaries with string keys. A byte[] stands for the array of a space of dtype uint8, in C
    /// order: a byte for each number of a picture. With several agents observations, actions, rewards and infos
    /// are dictionaries by agent. What is returned has long, double, string, byte[],
    /// List&lt;object&gt; and Dictionary&lt;string, object&gt;. Any number of episodes may be open at once.
    /// </remarks>
    public sealed class Client : IDisposable
    {
        const int Request = 0, Reply = 1, Failure = 2, Notice = 3;

        readonly string host;
        readonly int port;
        readonly Options options;
        readonly object gate = new object();
        Connection connection;
        string session = "";
        Dictionary<string, object> complaint;
        long lastId;
        // By episode: the first GetAction whose action may come, and nobody takes it.
        readonly Dictionary<string, long> notTaken = new Dictionary<string, long>();
        // By episode: the last call that was given up, and may never have come.
        readonly Dictionary<string, long> givenUp = new Dictionary<string, long>();
        // Of the last call that the bridge has refused.
        long refusedId;
        long limit = long.MaxValue;
        TimeSpan lease = TimeSpan.MaxValue;
        readonly Stopwatch sinceSent = Stopwatch.StartNew();
        bool disposed;

        /// <summary>Connect and join; a bridge that is not there yet is waited for.</summary>
        public Client(string host, int port, Options options = null)
        {
            this.host = host;
            this.port = port;
            this.options = options ?? new Options();
            Connected(new Deadline(this.options.Timeout), () => true);
        }

        /// <summary>What the bridge said: spaces, policy ids, lease, ids of open episodes.</summary>
        public Dictionary<string, object> Bridge { get; private set; }

        /// <summary>Begin an episode and return its id. Without training: act, but do not learn from it.</summary>
        public string StartEpisode(string episodeId = null, bool trainingEnabled = true)
        {
            var answer = Ask("StartEpisode", new Dictionary<string, object> {
                { "episode_id", episodeId }, { "training_enabled", trainingEnabled } });
            return Understood(() => (string)answer["episode_id"]);
        }

        /// <summary>Return the policy's action for an observation.</summary>
        public object GetAction(string episodeId, object observation, TimeSpan? timeout = null)
        {
            var answer = Ask("GetAction", new Dictionary<string, object> {
                { "episode_id", episodeId }, { "observation", observation } }, timeout);
            return Understood(() => answer["action"]);
        }

        /// <summary>Tell an action that was chosen elsewhere (off-policy).</summary>
        public void LogAction(string episodeId, object observation, object action)
        {
            Ask("LogAction", new Dictionary<string, object> {
                { "episode_id", episodeId }, { "observation", observation }, { "action", action } });
        }

        /// <summary>Tell what the last action has led to; adds up until the next observation.</summary>
        public void LogReturns(string episodeId, object reward, object info = null,
                               object terminateds = null, object truncateds = null)
        {
            Ask("LogReturns", new Dictionary<string, object> {
                { "episode_id", episodeId }, { "reward", reward }, { "info", info },
                { "terminateds", terminateds }, { "truncateds", truncateds } });
        }

        /// <summary>Tell the last observation. Truncated: it was cut short, for example by a time limit.</summary>
        public void EndEpisode(string episodeId, object observation, bool truncated = false,
                               object terminateds = null, object truncateds = null)
        {
            Ask("EndEpisode", new Dictionary<string, object> {
                { "episode_id", episodeId }, { "observation", observation }, { "truncated", truncated },
                { "terminateds", terminateds }, { "truncateds", truncateds } });
        }

        /// <summary>Say that this client lives. Only needed if no other call is made for longer than that.</summary>
        public void Heartbeat()
        {
            lock (gate)
            {
                if (connection != null) Send(Notice, 0, "Heartbeat", new Dictionary<string, object>(), new Deadline(options.Timeout), "");
            }
        }

        /// <summary>Leave. Episodes that are open wait for the bridge's lease.</summary>
        public void Dispose()
        {
            lock (gate)
            {
                disposed = true;
                if (connection == null) return;
                try
                {
                    Send(Notice, 0, "Goodbye", new Dictionary<string, object>(), new Deadline(TimeSpan.FromSeconds(1)), "");
                }
                catch (EnvbusException) { }
                Drop();
            }
        }

        // --- private

        Dictionary<string, object> Ask(string type, Dictionary<string, object> payload, TimeSpan? timeout = null)
        {
            lock (gate)
            {
                if (disposed) throw new ConnectionLostException("this client was disposed");
                var deadline = new Deadline(timeout ?? options.Timeout);
                long id = ++lastId;
                string episode = (string)payload["episode_id"] ?? "";
                long former;
                if (notTaken.TryGetValue(episode, out former)) payload["not_taken"] = former;
                if (givenUp.TryGetValue(episode, out former)) payload["given_up"] = former;
                try
                {
                    var reply = Connected(deadline, () => RequestReply(id, type, payload, deadline, "bridge"));
                    notTaken.Remove(episode);
                    givenUp.Remove(episode);
                    return reply;
                }
                catch (EnvbusException error)
                {
                    // The bridge may have answered all the same, or may never get it: the next calls of the
                    // episode tell it.
                    bool isLost = error is AnswerTimeoutException || error is ConnectionLostException;
                    if (isLost && type != "StartEpisode" && type != "EndEpisode" && refusedId != id)
                    {
                        if (type == "GetAction" && !notTaken.ContainsKey(episode)) notTaken[episode] = id;
                        givenUp[episode] = id;
                    }
                    throw;
                }
            }
        }

        /// Do something with a connection; again, when that is lost or cannot be made, until the deadline.
        T Connected<T>(Deadline deadline, Func<T> work)
        {
            for (int pause = 100; ; pause = Math.Min(2 * pause, 2000))
            {
                try
                {
                    if (sinceSent.Elapsed > lease) Drop(); // the broker has forgotten it
                    if (connection == null) Join(deadline);
                    return work();
                }
                catch (ConnectionLostException)
                {
                    // The bridge itself has ended; or it is late.
                    if (connection != null || deadline.Left.TotalMilliseconds < pause) throw;
                }
                Thread.Sleep(pause);
            }
        }

        Dictionary<string, object> RequestReply(long id, string type, Dictionary<string, object> payload, Deadline deadline, string to)
        {
            Send(Request, id, type, payload, deadline, to);
            // The bridge says itself that time is over; a moment later means that it cannot.
            var patience = deadline.Later(TimeSpan.FromSeconds(1));
            Dictionary<string, object> reply = null;
            while (reply == null)
            {
                var message = Receive(patience);
                reply = Understood(() => ReplyIn(message, id));
            }
            return reply;
        }

        /// Return the reply to a request, if the message is that; throw, if it says why there is none.
        Dictionary<string, object> ReplyIn(byte[] message, long id)
        {
            var frames = (List<object>)MessagePack.Unpack(message);
            var header = (List<object>)MessagePack.Unpack((byte[])frames[0]);
            var answer = (Dictionary<string, object>)MessagePack.Unpack((byte[])frames[1]);
            long kind = (long)header[1], answered = (long)header[2];
            if (answer == null) throw new InvalidCastException("a message without fields");
            if (answered == id && kind == Reply) return answer;
            if (kind == Failure && (string)answer["code"] == "not_joined")
            {
                Drop(); // our lease is over: we slept; after a new hello it is asked again
                throw ErrorOf(answer);
            }
            if (answered == id && kind == Failure)
            {
                var error = ErrorOf(answer);
                refusedId = id;
                throw error;
            }
            if (answered == 0 && kind == Failure) complaint = answer;
            if (kind == Notice && (string)header[3] == "Shutdown")
            {
                Drop();
                throw new ConnectionLostException("the bridge has ended");
            }
            return null; // a late answer, which nobody waits for any more
        }

        /// Return what is read of what came; whoever sent it is no bridge if that fails.
        T Understood<T>(Func<T> read)
        {
            try
            {
                return read();
            }
            catch (Exception error) when (!(error is EnvbusException))
            {
                Drop();
                throw new RefusedException("the other side sent what no bridge sends: " + error.Message);
            }
        }

        byte[] Receive(Deadline deadline)
        {
            try
            {
                return connection.Receive(deadline);
            }
            catch (ConnectionLostException)
            {
                Drop();
                if (complaint == null) throw;
                // The last words of a gateway that ends the connection; who is refused would be so again.
                var error = ErrorOf(complaint);
                complaint = null;
                throw error is AnswerTimeoutException ? new ConnectionLostException(error.Message) : error;
            }
            catch (EnvbusException error)
            {
                // What is no message leaves none behind it; and TLS cannot be read on where time was over.
                if (options.Tls || error is RefusedException) Drop();
                throw;
            }
        }

        void Send(int kind, long id, string type, Dictionary<string, object> payload, Deadline deadline, string to)
        {
            double left = kind == Request ? Math.Max(deadline.Left.TotalSeconds, 0.001) : 0.0;
            var header = new object[] { 1, kind, id, type, left, 0, to };
            var message = MessagePack.Pack(new object[] { MessagePack.Pack(header), MessagePack.Pack(payload) });
            if (message.Length > limit)
                throw new MessageTooLargeException(type + ": a message of " + message.Length + " bytes is over the gateway's limit of " + limit);
            try
            {
                connection.Send(message, deadline);
                sinceSent.Restart();
            }
            catch (EnvbusException) // perhaps in the midst of a message
            {
                Drop();
                throw;
            }
        }

        void Join(Deadline deadline)
        {
            connection = new Connection(host, port, options, deadline);
            try
            {
                if (options.Token != "")
                    Send(Notice, 0, "Token", new Dictionary<string, object> { { "token", options.Token } }, deadline, "");
                var welcome = RequestReply(++lastId, "Hello", new Dictionary<string, object> {
                    { "name", options.Name + "-" + Guid.NewGuid() },
                    { "heartbeat", options.Heartbeat.TotalSeconds } }, deadline, "");
                lease = Understood(() => TimeSpan.FromSeconds(Convert.ToDouble(welcome["lease"])));
                limit = Understood(() => Convert.ToInt64(welcome["max_message_bytes"]));
                var hello = new Dictionary<string, object> {
                    { "client", options.Name }, { "plain", true }, { "resume", session } };
                try
                {
                    Bridge = RequestReply(++lastId, "JoinBridge", hello, deadline, "bridge");
                }
                catch (SessionLostException) // away for too long: begin anew, without the old episodes
                {
                    hello["resume"] = "";
                    Bridge = RequestReply(++lastId, "JoinBridge", hello, deadline, "bridge");
                }
                session = Understood(() => (string)Bridge["session"]);
                var open = Understood(() => (List<object>)Bridge["episodes"]);
                foreach (var ids in new[] { notTaken, givenUp })
                    foreach (string episode in new List<string>(ids.Keys))
                        if (!open.Contains(episode)) ids.Remove(episode); // what is over will not be told of
            }
            catch
            {
                Drop();
                throw;
            }
        }

        void Drop()
        {
            if (connection != null) connection.Dispose();
            connection = null;
        }

        static EnvbusException ErrorOf(Dictionary<string, object> failed)
        {
            string code = (string)failed["code"], what = (string)failed["message"], type = (string)failed["remote_type"];
            if (code == "timeout") return new AnswerTimeoutException(what);
            if (code == "peer_lost" || code == "not_joined") return new ConnectionLostException(what);
            if (code == "overloaded") return new OverloadedException(what);
            if (code == "no_peer" || code == "version" || code == "protocol") return new RefusedException(what);
            if (code != "remote") return new RemoteException(code + ": " + what); // it is newer than this
            switch (type)
            {
                case "Refused": return new RefusedException(what);
                case "EpisodeError": return new EpisodeException(what);
                case "EpisodeNotFound": return new EpisodeNotFoundException(what);
                case "EpisodeAlreadyStarted": return new EpisodeAlreadyStartedException(what);
                case "EpisodeFinished": return new EpisodeFinishedException(what);
                case "EpisodeBusy": return new EpisodeBusyException(what);
                case "EpisodeLost": return new EpisodeLostException(what);
                case "SpaceMismatch": return new SpaceMismatchException(what);
                case "SessionLost": return new SessionLostException(what);
                default: return new RemoteException(type + ": " + what);
            }
        }
    }

    // --- the connection ----------------------------------------------------------------------

    /// <summary>A point in time.</summary>
    sealed class Deadline
    {
        readonly Stopwatch since = Stopwatch.StartNew();
        readonly TimeSpan allowed;

        public Deadline(TimeSpan allowed) { this.allowed = allowed; }
        public TimeSpan Left { get { return allowed - since.Elapsed; } }
        public Deadline Later(TimeSpan by) { return new Deadline(Left + by); }
        /// For sockets, where 0 would mean for ever.
        public int Milliseconds { get { return (int)Math.Min(Math.Max(Left.TotalMilliseconds, 1), int.MaxValue); } }
    }

    /// <summary>A TCP connection that carries messages: 4 bytes of length, then the message.</summary>
    sealed class Connection : IDisposable
    {
        readonly TcpClient tcp = new TcpClient { NoDelay = true };
        readonly Stream stream;
        readonly bool isSecure;
        // What has come of a message is kept if the time is over in its midst.
        byte[] incoming = new byte[4];
        int filled;

        public Connection(string host, int port, Options options, Deadline deadline)
        {
            try
            {
                var connecting = tcp.ConnectAsync(host, port);
                if (!connecting.Wait(deadline.Milliseconds))
                    throw new AnswerTimeoutException("nobody answers at " + host + ":" + port + ", in time");
                stream = tcp.GetStream();
                if (options.Tls)
                {
                    var secure = new SslStream(stream, false, options.ValidateCertificate);
                    stream = secure;
                    isSecure = true;
                    InTime(deadline, () => { secure.AuthenticateAsClient(host); return 0; });
                }
            }
            catch (Exception error)
            {
                tcp.Close();
                if (error is EnvbusException) throw;
                string what = "cannot connect to " + host + ":" + port + ": " + error.GetBaseException().Message;
                if (error is AuthenticationException) throw new RefusedException(what); // its certificate
                throw new ConnectionLostException(what);
            }
        }

        public void Dispose() { tcp.Close(); }

        public void Send(byte[] message, Deadline deadline)
        {
            var data = new byte[4 + message.Length];
            for (int i = 0; i < 4; i++) data[i] = (byte)(message.Length >> (24 - 8 * i));
            message.CopyTo(data, 4);
            Guarded(deadline, () =>
            {
                stream.WriteTimeout = deadline.Milliseconds;
                stream.Write(data, 0, data.Length);
                return 0;
            });
        }

        public byte[] Receive(Deadline deadline)
        {
            Fill(deadline);
            if (incoming.Length == 4)
            {
                int size = incoming[0] << 24 | incoming[1] << 16 | incoming[2] << 8 | incoming[3];
                if (size < 0 || size > 1 << 30) throw new RefusedException("the other side sent what no bridge sends");
                Array.Resize(ref incoming, 4 + size);
            }
            Fill(deadline);
            var message = new byte[incoming.Length - 4];
            Array.Copy(incoming, 4, message, 0, message.Length);
            incoming = new byte[4];
            filled = 0;
            return message;
        }

        void Fill(Deadline deadline)
        {
            while (filled < incoming.Length)
            {
                if (deadline.Left < TimeSpan.Zero) throw new AnswerTimeoutException("no answer came in time");
                int count = Guarded(deadline, () =>
                {
                    stream.ReadTimeout = deadline.Milliseconds;
                    return stream.Read(incoming, filled, incoming.Length - filled);
                });
                if (count == 0) throw new ConnectionLostException("the other side has closed the connection");
                filled += count;
            }
        }

        /// Do what TLS may need many reads for, each with a time-out of its own; when time is over it is closed.
        int InTime(Deadline deadline, Func<int> work)
        {
            int ender = 0; // 1: the work, 2: the timer; whoever is first. A timer that is late leaves the next call alone.
            using (new Timer(_ => { if (Interlocked.CompareExchange(ref ender, 2, 0) == 0) tcp.Close(); },
                             null, deadline.Milliseconds, Timeout.Infinite))
            {
                try
                {
                    int result = work();
                    if (Interlocked.CompareExchange(ref ender, 1, 0) == 0) return result;
                }
                catch (Exception) when (Interlocked.CompareExchange(ref ender, 1, 0) != 0) { }
                throw new AnswerTimeoutException("no answer came in time");
            }
        }

        int Guarded(Deadline deadline, Func<int> work)
        {
            try
            {
                return isSecure ? InTime(deadline, work) : work();
            }
            catch (Exception error) when (error is IOException || error is AggregateException) // Mono's TLS: the latter
            {
                var cause = error.GetBaseException() as SocketException;
                if (cause != null && (cause.SocketErrorCode == SocketError.TimedOut || cause.SocketErrorCode == SocketError.WouldBlock))
                    throw new AnswerTimeoutException("no answer came in time");
                throw new ConnectionLostException(error.GetBaseException().Message);
            }
            catch (ObjectDisposedException)
            {
                throw new ConnectionLostException("this client was disposed");
            }
        }
    }

    // --- MessagePack -------------------------------------------------------------------------

    /// <summary>The part of MessagePack that the protocol needs; no ext types.</summary>
    public static class MessagePack
    {
        const int MaxDepth = 64;

        public static byte[] Pack(object value)
        {
            var stream = new MemoryStream();
            Write(stream, value);
            return stream.ToArray();
        }

        public static object Unpack(byte[] data)
        {
            int at = 0;
            return Read(data, ref at, 0);
        }

        static void Write(Stream stream, object value)
        {
            if (value == null) stream.WriteByte(0xc0);
            else if (value is bool) stream.WriteByte((byte)((bool)value ? 0xc3 : 0xc2));
            else if (value is float || value is double)
                WriteNumber(stream, 0xcb, (ulong)BitConverter.DoubleToInt64Bits(Convert.ToDouble(value)), 8);
            else if (value is string)
            {
                var text = Encoding.UTF8.GetBytes((string)value);
                WriteHead(stream, text.Length, 0xa0, 32, 0xd9, true);
                stream.Write(text, 0, text.Length);
            }
            else if (value is byte[])
            {
                var bytes = (byte[])value;
                WriteHead(stream, bytes.Length, 0, 0, 0xc4, true);
                stream.Write(bytes, 0, bytes.Length);
            }
            else if (value is IDictionary)
            {
                var map = (IDictionary)value;
                WriteHead(stream, map.Count, 0x80, 16, 0xdd, false);
                foreach (DictionaryEntry pair in map)
                {
                    Write(stream, pair.Key);
                    Write(stream, pair.Value);
                }
            }
            else if (value is IList)
            {
                var items = (IList)value;
                WriteHead(stream, items.Count, 0x90, 16, 0xdb, false);
                foreach (object item in items) Write(stream, item);
            }
            else if (value is ulong && (ulong)value > long.MaxValue) WriteNumber(stream, 0xcf, (ulong)value, 8);
            else if (value is IConvertible) WriteInteger(stream, Convert.ToInt64(value));
            else throw new EnvbusException("a " + value.GetType() + " has no form in MessagePack");
        }

        static void WriteInteger(Stream stream, long value)
        {
            if (value >= -32 && value < 128) stream.WriteByte((byte)value);
            else if (value >= 0 && value <= byte.MaxValue) WriteNumber(stream, 0xcc, (ulong)value, 1);
            else if (value >= 0 && value <= ushort.MaxValue) WriteNumber(stream, 0xcd, (ulong)value, 2);
            else if (value >= 0 && value <= uint.MaxValue) WriteNumber(stream, 0xce, (ulong)value, 4);
            else if (value < 0 && value >= short.MinValue) WriteNumber(stream, 0xd1, (ulong)value, 2);
            else if (value < 0 && value >= int.MinValue) WriteNumber(stream, 0xd2, (ulong)value, 4);
            else WriteNumber(stream, 0xd3, (ulong)value, 8);
        }

        /// A type with a length: in one byte, or in `first` and 1 (not lists and maps), 2 or 4 more.
        static void WriteHead(Stream stream, int size, int inOne, int limit, int first, bool hasShort)
        {
            if (size < limit) stream.WriteByte((byte)(inOne | size));
            else if (hasShort && size < 0x100) WriteNumber(stream, first, (ulong)size, 1);
            else if (size < 0x10000) WriteNumber(stream, first + 1, (ulong)size, 2);
            else WriteNumber(stream, first + 2, (ulong)size, 4);
        }

        static void WriteNumber(Stream stream, int first, ulong value, int size)
        {
            stream.WriteByte((byte)first);
            for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) stream.WriteByte((byte)(value >> shift));
        }

        static object Read(byte[] data, ref int at, int depth)
        {
            if (depth > MaxDepth) throw new EnvbusException("a value is nested too deeply");
            int first = (int)ReadNumber(data, ref at, 1);
            if (first < 0x80) return (long)first;
            if (first < 0x90) return ReadMap(data, ref at, first & 0x0f, depth);
            if (first < 0xa0) return ReadList(data, ref at, first & 0x0f, depth);
            if (first < 0xc0) return ReadText(data, ref at, first & 0x1f);
            if (first >= 0xe0) return (long)(sbyte)first;
            switch (first)
            {
                case 0xc0: return null;
                case 0xc2: return false;
                case 0xc3: return true;
                case 0xc4: case 0xc5: case 0xc6: return ReadBytes(data, ref at, (long)ReadNumber(data, ref at, 1 << (first - 0xc4)));
                case 0xca: return (double)BitConverter.ToSingle(BitConverter.GetBytes((uint)ReadNumber(data, ref at, 4)), 0);
                case 0xcb: return BitConverter.Int64BitsToDouble((long)ReadNumber(data, ref at, 8));
                case 0xcc: case 0xcd: case 0xce: return (long)ReadNumber(data, ref at, 1 << (first - 0xcc));
                case 0xcf:
                    ulong large = ReadNumber(data, ref at, 8);
                    return large > long.MaxValue ? large : (object)(long)large;
                case 0xd0: return (long)(sbyte)ReadNumber(data, ref at, 1);
                case 0xd1: return (long)(short)ReadNumber(data, ref at, 2);
                case 0xd2: return (long)(int)ReadNumber(data, ref at, 4);
                case 0xd3: return (long)ReadNumber(data, ref at, 8);
                case 0xd9: case 0xda: case 0xdb: return ReadText(data, ref at, (long)ReadNumber(data, ref at, 1 << (first - 0xd9)));
                case 0xdc: case 0xdd: return ReadList(data, ref at, (long)ReadNumber(data, ref at, 2 << (first - 0xdc)), depth);
                case 0xde: case 0xdf: return ReadMap(data, ref at, (long)ReadNumber(data, ref at, 2 << (first - 0xde)), depth);
                default: throw new EnvbusException("MessagePack type 0x" + first.ToString("x") + " has no form here");
            }
        }

        static ulong ReadNumber(byte[] data, ref int at, int size)
        {
            if (size > data.Length - at) throw new EnvbusException("a message is cut short");
            ulong value = 0;
            while (size-- > 0) value = value << 8 | data[at++];
            return value;
        }

        static byte[] ReadBytes(byte[] data, ref int at, long size)
        {
            if (size > data.Length - at) throw new EnvbusException("a message is cut short");
            var bytes = new byte[size];
            Array.Copy(data, at, bytes, 0, size);
            at += (int)size;
            return bytes;
        }

        static string ReadText(byte[] data, ref int at, long size) { return Encoding.UTF8.GetString(ReadBytes(data, ref at, size)); }

        static List<object> ReadList(byte[] data, ref int at, long size, int depth)
        {
            var items = new List<object>();
            while (size-- > 0) items.Add(Read(data, ref at, depth + 1));
            return items;
        }

        static Dictionary<string, object> ReadMap(byte[] data, ref int at, long size, int depth)
        {
            var items = new Dictionary<string, object>();
            while (size-- > 0)
            {
                var key = Read(data, ref at, depth + 1) as string;
                if (key == null) throw new EnvbusException("a map has a key that is no string");
                items[key] = Read(data, ref at, depth + 1);
            }
            return items;
        }
    }
}
