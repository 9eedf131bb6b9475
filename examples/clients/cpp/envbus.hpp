// A client of an envbus bridge: a simulator drives itself and asks for actions.
//
// One header, C++17, POSIX sockets, no dependencies. README.md shows how to use it;
// docs/wire-protocol.md, sections 10 and 11, is what it speaks.

#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace envbus {

// --- errors ----------------------------------------------------------------------------------

/// Base of all that is thrown here.
struct Error : std::runtime_error { using runtime_error::runtime_error; };
/// There was no connection until the time was over, or the bridge has ended.
struct ConnectionLost : Error { using Error::Error; };
/// Refused at once because a limit is reached; later there may be room.
struct Overloaded : ConnectionLost { using ConnectionLost::ConnectionLost; };
/// No answer came in time.
struct TimeoutError : Error { using Error::Error; };
/// The bridge, or the gateway before it, does not understand or does not want this client.
struct Refused : Error { using Error::Error; };
/// A call is larger than the gateway takes; the message says its size and the limit.
struct MessageTooLarge : Refused { using Refused::Refused; };
/// A call does not fit its episode, which goes on as it was.
struct EpisodeError : Refused { using Refused::Refused; };
struct EpisodeNotFound : EpisodeError { using EpisodeError::EpisodeError; };
struct EpisodeAlreadyStarted : EpisodeError { using EpisodeError::EpisodeError; };
struct EpisodeFinished : EpisodeError { using EpisodeError::EpisodeError; };
struct EpisodeBusy : EpisodeError { using EpisodeError::EpisodeError; };
struct EpisodeLost : EpisodeError { using EpisodeError::EpisodeError; };
/// An observation or action is outside its space; the message says which and what was expected.
struct SpaceMismatch : EpisodeError { using EpisodeError::EpisodeError; };
/// This client was away for too long; its episodes are over.
struct SessionLost : Refused { using Refused::Refused; };
/// Something failed at the other side, for example the policy.
struct RemoteError : Error { using Error::Error; };
/// A value is not what it was taken for, or bytes are no MessagePack.
struct ValueError : Error { using Error::Error; };

// --- values ----------------------------------------------------------------------------------

/// Whatever is observed, done or told: nil, bool, int, float, string, bytes, array, map.
class Value {
 public:
  using Array = std::vector<Value>;
  using Bytes = std::vector<std::uint8_t>;
  using Map = std::map<std::string, Value>;

  Value() : data_(nullptr) {}
  Value(std::nullptr_t) : data_(nullptr) {}
  Value(const char* text) : data_(std::string(text)) {}
  Value(std::string text) : data_(std::move(text)) {}
  Value(Bytes bytes) : data_(std::move(bytes)) {}
  Value(Array items) : data_(std::move(items)) {}
  Value(Map items) : data_(std::move(items)) {}
  Value(std::initializer_list<Value> items) : data_(Array(items)) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  Value(T number) : data_(stored(number)) {}
  /// An array of numbers. A vector of `std::uint8_t` is bytes instead, which a space of that dtype takes for
  /// its array, in C order: a byte for each number of a picture.
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  Value(const std::vector<T>& numbers) : data_(Array(numbers.begin(), numbers.end())) {}

  bool is_nil() const { return std::holds_alternative<std::nullptr_t>(data_); }
  bool as_bool() const { return get<bool>("a bool"); }
  std::int64_t as_int() const { return get<std::int64_t>("an int below 2^63"); }
  /// An int from 0 to 2^64 - 1.
  std::uint64_t as_uint() const {
    if (const auto* large = std::get_if<std::uint64_t>(&data_)) return *large;
    if (get<std::int64_t>("an int") < 0) throw ValueError("an int is negative");
    return static_cast<std::uint64_t>(as_int());
  }
  /// A float, or an int as one.
  double as_float() const {
    if (const auto* large = std::get_if<std::uint64_t>(&data_)) return static_cast<double>(*large);
    const auto* number = std::get_if<std::int64_t>(&data_);
    return number ? static_cast<double>(*number) : get<double>("a float");
  }
  const std::string& as_string() const { return get<std::string>("a string"); }
  const Bytes& as_bytes() const { return get<Bytes>("bytes"); }
  const Array& as_array() const { return get<Array>("an array"); }
  const Map& as_map() const { return get<Map>("a map"); }
  const Value& operator[](const std::string& key) const {
    const auto found = as_map().find(key);
    if (found == as_map().end()) throw ValueError("there is no key " + key);
    return found->second;
  }
  const Value& operator[](std::size_t index) const {
    if (index >= as_array().size()) throw ValueError("an array is too short");
    return as_array()[index];
  }
  bool operator==(const Value& other) const { return data_ == other.data_; }

  template <typename Visitor>
  decltype(auto) visit(Visitor&& visitor) const { return std::visit(visitor, data_); }

 private:
  /// An unsigned int is one that a signed one does not hold.
  using Data = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Bytes, Array, Map,
                            std::uint64_t>;

  template <typename T>
  static Data stored(T number) {
    if constexpr (std::is_same_v<T, bool>) return number;
    else if constexpr (std::is_integral_v<T>) {
      const auto bits = static_cast<std::uint64_t>(number);
      if (std::is_unsigned_v<T> && bits > INT64_MAX) return bits;
      return static_cast<std::int64_t>(number);
    } else return static_cast<double>(number);
  }

  template <typename T>
  const T& get(const char* wanted) const {
    if (const T* found = std::get_if<T>(&data_)) return *found;
    throw ValueError(std::string("a value is not ") + wanted);
  }

  Data data_;
};

// --- MessagePack -----------------------------------------------------------------------------

class Packer {
 public:
  Value::Bytes bytes;

  void pack(const Value& value) { value.visit(*this); }

  void operator()(std::nullptr_t) { byte(0xc0); }
  void operator()(bool value) { byte(value ? 0xc3 : 0xc2); }
  void operator()(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    if (value >= -32 && value < 128) byte(static_cast<std::uint8_t>(value));
    else if (value >= 0 && bits <= 0xff) { byte(0xcc); number(bits, 1); }
    else if (value >= 0 && bits <= 0xffff) { byte(0xcd); number(bits, 2); }
    else if (value >= 0 && bits <= 0xffffffff) { byte(0xce); number(bits, 4); }
    else if (value >= INT16_MIN && value < 0) { byte(0xd1); number(bits, 2); }
    else if (value >= INT32_MIN && value < 0) { byte(0xd2); number(bits, 4); }
    else { byte(0xd3); number(bits, 8); }
  }
  void operator()(std::uint64_t value) { byte(0xcf); number(value, 8); }
  void operator()(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, 8);
    byte(0xcb);
    number(bits, 8);
  }
  void operator()(const std::string& text) {
    head(text.size(), 0xa0, 32, 0xd9, true);
    bytes.insert(bytes.end(), text.begin(), text.end());
  }
  void operator()(const Value::Bytes& data) {
    head(data.size(), 0, 0, 0xc4, true);
    bytes.insert(bytes.end(), data.begin(), data.end());
  }
  void operator()(const Value::Array& items) {
    head(items.size(), 0x90, 16, 0xdb, false);
    for (const Value& item : items) pack(item);
  }
  void operator()(const Value::Map& items) {
    head(items.size(), 0x80, 16, 0xdd, false);
    for (const auto& [key, item] : items) { (*this)(key); pack(item); }
  }

 private:
  void byte(std::uint8_t value) { bytes.push_back(value); }
  void number(std::uint64_t value, int size) {
    for (int shift = 8 * (size - 1); shift >= 0; shift -= 8)
      byte(static_cast<std::uint8_t>(value >> shift));
  }
  /// A type with a length: in one byte, or in `first` and 1 (not arrays and maps), 2 or 4 more.
  void head(std::size_t size, int fixed, std::size_t limit, int first, bool has_short) {
    if (size < limit) byte(static_cast<std::uint8_t>(fixed | size));
    else if (has_short && size < 0x100) { byte(first); number(size, 1); }
    else if (size < 0x10000) { byte(first + 1); number(size, 2); }
    else if (size < 0x100000000) { byte(first + 2); number(size, 4); }
    else throw ValueError("a value is too large");
  }
};

class Unpacker {
 public:
  Unpacker(const std::uint8_t* begin, const std::uint8_t* end) : at_(begin), end_(end) {}

  Value unpack() {
    if (++depth_ > 64) throw ValueError("a value is nested too deeply");
    Value value = read();
    --depth_;
    return value;
  }

 private:
  Value read() {
    const auto first = static_cast<std::uint8_t>(number(1));
    if (first < 0x80) return first;
    if (first < 0x90) return map(first & 0x0f);
    if (first < 0xa0) return array(first & 0x0f);
    if (first < 0xc0) return text(first & 0x1f);
    if (first >= 0xe0) return static_cast<std::int8_t>(first);
    switch (first) {
      case 0xc0: return nullptr;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: {
        const std::size_t size = number(1 << (first - 0xc4));
        const auto* data = take(size);
        return Value::Bytes(data, data + size);
      }
      case 0xca: return real<float, std::uint32_t>();
      case 0xcb: return real<double, std::uint64_t>();
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return number(1 << (first - 0xcc));
      case 0xd0: return static_cast<std::int8_t>(number(1));
      case 0xd1: return static_cast<std::int16_t>(number(2));
      case 0xd2: return static_cast<std::int32_t>(number(4));
      case 0xd3: return static_cast<std::int64_t>(number(8));
      case 0xd9: case 0xda: case 0xdb: return text(number(1 << (first - 0xd9)));
      case 0xdc: case 0xdd: return array(number(2 << (first - 0xdc)));
      case 0xde: case 0xdf: return map(number(2 << (first - 0xde)));
      default: throw ValueError("a MessagePack type has no form here");
    }
  }
  const std::uint8_t* take(std::size_t size) {
    if (size > static_cast<std::size_t>(end_ - at_)) throw ValueError("a message is cut short");
    return std::exchange(at_, at_ + size);
  }
  std::uint64_t number(int size) {
    const auto* data = take(size);
    std::uint64_t value = 0;
    for (int i = 0; i < size; ++i) value = value << 8 | data[i];
    return value;
  }
  template <typename Real, typename Bits>
  Value real() {
    const auto bits = static_cast<Bits>(number(sizeof(Bits)));
    Real value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  Value text(std::size_t size) {
    const auto* data = take(size);
    return std::string(data, data + size);
  }
  Value array(std::size_t size) {
    Value::Array items;
    while (size--) items.push_back(unpack());
    return items;
  }
  Value map(std::size_t size) {
    Value::Map items;
    while (size--) {
      std::string key = unpack().as_string();
      items[std::move(key)] = unpack();
    }
    return items;
  }

  const std::uint8_t *at_, *end_;
  int depth_ = 0;
};

inline Value::Bytes pack(const Value& value) {
  Packer packer;
  packer.pack(value);
  return std::move(packer.bytes);
}

inline Value unpack(const Value::Bytes& bytes) {
  return Unpacker(bytes.data(), bytes.data() + bytes.size()).unpack();
}

// --- the connection --------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

inline Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

/// A TCP connection that carries messages: 4 bytes of length, then the message.
class Connection {
 public:
  Connection(const std::string& host, int port, Clock::time_point deadline) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (failed) throw ConnectionLost("cannot resolve " + host + ": " + gai_strerror(failed));
    int error = 0;
    for (auto* where = found; where && fd_ < 0; where = where->ai_next) error = open(*where, deadline);
    freeaddrinfo(found);
    if (fd_ < 0)
      throw ConnectionLost("cannot connect to " + host + ":" + std::to_string(port) + ": " +
                           std::strerror(error));
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(const Value::Bytes& message, Clock::time_point deadline) {
    const auto size = static_cast<std::uint32_t>(message.size());
    Value::Bytes data{std::uint8_t(size >> 24), std::uint8_t(size >> 16), std::uint8_t(size >> 8),
                      std::uint8_t(size)};
    data.insert(data.end(), message.begin(), message.end());
    for (std::size_t sent = 0; sent < data.size();) {
      wait(POLLOUT, deadline);
      const auto count = ::send(fd_, data.data() + sent, data.size() - sent, kNoSignal);
      if (count < 0 && errno != EAGAIN && errno != EINTR) throw ConnectionLost(std::strerror(errno));
      sent += std::max<ssize_t>(count, 0);
    }
  }

  Value::Bytes receive(Clock::time_point deadline) {
    // What has come of a message is kept if the time is over in its midst.
    while (incoming_.size() < 4 || incoming_.size() < 4 + announced()) {
      if (Clock::now() >= deadline) throw TimeoutError("no answer came in time");  // whatever comes
      wait(POLLIN, deadline);
      std::uint8_t chunk[16384];
      const auto count = recv(fd_, chunk, sizeof chunk, 0);
      if (count == 0) throw ConnectionLost("the other side has closed the connection");
      if (count < 0 && errno != EAGAIN && errno != EINTR) throw ConnectionLost(std::strerror(errno));
      if (count > 0) incoming_.insert(incoming_.end(), chunk, chunk + count);
    }
    const auto end = incoming_.begin() + 4 + announced();
    Value::Bytes message(incoming_.begin() + 4, end);
    incoming_.erase(incoming_.begin(), end);
    return message;
  }

 private:
#ifdef MSG_NOSIGNAL
  static constexpr int kNoSignal = MSG_NOSIGNAL;  // an error, not SIGPIPE
#else
  static constexpr int kNoSignal = 0;
#endif

  int open(const addrinfo& where, Clock::time_point deadline) {
    fd_ = socket(where.ai_family, where.ai_socktype, where.ai_protocol);
    if (fd_ < 0) return errno;
    fcntl(fd_, F_SETFL, O_NONBLOCK);
    fcntl(fd_, F_SETFD, FD_CLOEXEC);
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int error = connect(fd_, where.ai_addr, where.ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd poll_fd{fd_, POLLOUT, 0};
      socklen_t size = sizeof error;
      if (poll(&poll_fd, 1, milliseconds_until(deadline)) == 0) error = ETIMEDOUT;
      else getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error) {
      close(fd_);
      fd_ = -1;
    }
    return error;
  }

  static int milliseconds_until(Clock::time_point deadline) {
    const auto left = Seconds(deadline - Clock::now()).count() * 1000 + 1;
    return static_cast<int>(std::clamp(left, 0.0, 1e9));
  }

  void wait(short event, Clock::time_point deadline) const {
    pollfd poll_fd{fd_, event, 0};
    if (poll(&poll_fd, 1, milliseconds_until(deadline)) == 0 && Clock::now() >= deadline)
      throw TimeoutError("no answer came in time");
  }

  std::size_t announced() const {
    const std::size_t size =
        std::size_t(incoming_[0]) << 24 | incoming_[1] << 16 | incoming_[2] << 8 | incoming_[3];
    if (size > std::size_t(1) << 30) throw Refused("the other side sent what no bridge sends");
    return size;
  }

  int fd_ = -1;
  Value::Bytes incoming_;
};

// --- the client ------------------------------------------------------------------------------

struct Options {
  std::string name = "simulator";
  std::string token;
  /// Seconds for each call, unless it says otherwise, and to connect.
  double timeout = 60.0;
  /// Seconds, 60 at most: after four times that without a call the bridge takes this client for
  /// hung, and its episodes begin to wait for the lease.
  double heartbeat = 60.0;
};

/// A session with a bridge, over one TCP connection at a time. Used by one thread at a time.
///
/// Each call waits for its answer. Any number of episodes may be open at once. With several agents
/// observations, actions, rewards and infos are maps by agent. A call whose connection is lost
/// connects again and asks again; the bridge answers each question once.
class Client {
 public:
  /// Connect and join; a bridge that is not there yet is waited for. Throws `ConnectionLost`,
  /// `TimeoutError`, `Refused`.
  Client(std::string host, int port, Options options = {})
      : host_(std::move(host)), port_(port), options_(std::move(options)) {
    connected(after(options_.timeout), [] {});
  }
  /// Leave. Episodes that are open wait for the bridge's lease.
  ~Client() {
    try {
      if (connection_) send(kNotice, 0, "Goodbye", Value::Map{}, after(1.0), "");
    } catch (const Error&) {
    }
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  /// What the bridge said: spaces, policy ids, lease, ids of open episodes.
  const Value& bridge() const { return bridge_; }

  /// Begin an episode and return its id. Without training: act, but do not learn from it.
  std::string start_episode(const std::string& episode_id = "", bool training_enabled = true) {
    const Value id = episode_id.empty() ? Value() : Value(episode_id);
    return ask("StartEpisode", Value::Map{{"episode_id", id}, {"training_enabled", training_enabled}})
        ["episode_id"].as_string();
  }

  /// Return the policy's action for an observation. `timeout`: seconds; 0: as in the options.
  Value get_action(const std::string& episode_id, const Value& observation, double timeout = 0.0) {
    return ask("GetAction", Value::Map{{"episode_id", episode_id}, {"observation", observation}},
               timeout)["action"];
  }

  /// Tell an action that was chosen elsewhere (off-policy).
  void log_action(const std::string& episode_id, const Value& observation, const Value& action) {
    ask("LogAction",
        Value::Map{{"episode_id", episode_id}, {"observation", observation}, {"action", action}});
  }

  /// Tell what the last action has led to; adds up until the next observation.
  void log_returns(const std::string& episode_id, const Value& reward, const Value& info = nullptr,
                   const Value& terminateds = nullptr, const Value& truncateds = nullptr) {
    ask("LogReturns", Value::Map{{"episode_id", episode_id}, {"reward", reward}, {"info", info},
                                 {"terminateds", terminateds}, {"truncateds", truncateds}});
  }

  /// Tell the last observation. `truncated`: it was cut short, for example by a time limit.
  void end_episode(const std::string& episode_id, const Value& observation, bool truncated = false,
                   const Value& terminateds = nullptr, const Value& truncateds = nullptr) {
    ask("EndEpisode", Value::Map{{"episode_id", episode_id}, {"observation", observation},
                                 {"truncated", truncated}, {"terminateds", terminateds},
                                 {"truncateds", truncateds}});
  }

  /// Say that this client lives. Only needed if no other call is made for longer than that.
  void heartbeat() {
    if (connection_) send(kNotice, 0, "Heartbeat", Value::Map{}, after(options_.timeout), "");
  }

 private:
  enum Kind { kRequest = 0, kReply = 1, kFailure = 2, kNotice = 3 };

  Value ask(const char* type, Value::Map payload, double timeout = 0.0) {
    const auto deadline = after(timeout > 0 ? timeout : options_.timeout);
    const std::int64_t id = ++last_id_;
    const Value episode = payload["episode_id"];
    const std::string name = episode.is_nil() ? "" : episode.as_string();
    const auto not_taken = not_taken_.find(name), given_up = given_up_.find(name);
    if (not_taken != not_taken_.end()) payload["not_taken"] = not_taken->second;
    if (given_up != given_up_.end()) payload["given_up"] = given_up->second;
    try {
      const Value reply =
          connected(deadline, [&] { return request(id, type, payload, deadline, "bridge"); });
      not_taken_.erase(name);
      given_up_.erase(name);
      return reply;
    } catch (const TimeoutError&) {
      give_up(type, name, id);
      throw;
    } catch (const ConnectionLost&) {
      give_up(type, name, id);
      throw;
    }
  }

  /// The bridge may have answered all the same, or may never get it: the next calls of the episode tell it.
  void give_up(const std::string& type, const std::string& episode, std::int64_t id) {
    if (type == "StartEpisode" || type == "EndEpisode" || refused_id_ == id) return;
    if (type == "GetAction") not_taken_.emplace(episode, id);
    given_up_[episode] = id;
  }

  /// Do something with a connection; again, when that is lost or cannot be made, until `deadline`.
  template <typename Work>
  auto connected(Clock::time_point deadline, Work work) -> decltype(work()) {
    for (double pause = 0.1;; pause = std::min(2 * pause, 2.0)) {
      try {
        if (Clock::now() > forgotten_at_) connection_.reset();
        if (!connection_) join(deadline);
        return work();
      } catch (const ConnectionLost&) {
        if (connection_ || after(pause) >= deadline) throw;  // the bridge itself has ended; or late
      }
      std::this_thread::sleep_for(Seconds(pause));
    }
  }

  Value request(std::int64_t id, const char* type, const Value& payload, Clock::time_point deadline,
                const char* to) {
    send(kRequest, id, type, payload, deadline, to);
    // The bridge says itself that time is over; a moment later means that it cannot.
    return answer(id, deadline + std::chrono::seconds(1));
  }

  Value answer(std::int64_t id, Clock::time_point deadline) {
    for (;;) {
      const Value frames = unpack(receive(deadline));
      const Value header = unpack(frames[0].as_bytes()), payload = unpack(frames[1].as_bytes());
      const std::int64_t kind = header[1].as_int(), answered = header[2].as_int();
      if (answered == id && kind == kReply) return payload;
      // Our lease is over: we slept. After a new hello it is asked again.
      if (kind == kFailure && payload["code"].as_string() == "not_joined") {
        connection_.reset();
        throw ConnectionLost(payload["message"].as_string());
      }
      if (answered == id && kind == kFailure) {
        refused_id_ = id;
        raise(payload);
      }
      if (answered == 0 && kind == kFailure) complaint_ = payload;
      if (kind == kNotice && header[3].as_string() == "Shutdown") {
        connection_.reset();
        throw ConnectionLost("the bridge has ended");
      }
      // All else is a late answer, which nobody waits for any more.
    }
  }

  Value::Bytes receive(Clock::time_point deadline) {
    try {
      return connection_->receive(deadline);
    } catch (const ConnectionLost&) {
      connection_.reset();
      // The last words of a gateway that ends the connection; who is refused would be so again.
      const Value complaint = std::exchange(complaint_, nullptr);
      if (complaint.is_nil()) throw;
      try {
        raise(complaint);
      } catch (const TimeoutError& error) {
        throw ConnectionLost(error.what());
      }
    } catch (const Refused&) {  // what is no message leaves none behind it
      connection_.reset();
      throw;
    }
  }

  void send(Kind kind, std::int64_t id, const char* type, const Value& payload,
            Clock::time_point deadline, const char* to) {
    const double left = std::max(Seconds(deadline - Clock::now()).count(), 0.001);
    const Value header{1, int(kind), id, type, kind == kRequest ? left : 0.0, 0, to};
    const Value::Bytes message = pack(Value{pack(header), pack(payload)});
    if (message.size() > limit_)
      throw MessageTooLarge(std::string(type) + ": a message of " + std::to_string(message.size()) +
                            " bytes is over the gateway's limit of " + std::to_string(limit_));
    try {
      connection_->send(message, deadline);
      forgotten_at_ = after(lease_);
    } catch (const Error&) {  // perhaps in the midst of a message
      connection_.reset();
      throw;
    }
  }

  void join(Clock::time_point deadline) {
    thread_local std::mt19937_64 random{std::random_device{}()};  // each client has its own thread
    connection_ = std::make_unique<Connection>(host_, port_, deadline);
    try {
      if (!options_.token.empty())
        send(kNotice, 0, "Token", Value::Map{{"token", options_.token}}, deadline, "");
      const std::string name = options_.name + "-" + std::to_string(random());
      const Value::Map greeting{{"name", name}, {"heartbeat", options_.heartbeat}};
      const Value welcome = request(++last_id_, "Hello", greeting, deadline, "");
      lease_ = welcome["lease"].as_float();
      limit_ = static_cast<std::size_t>(welcome["max_message_bytes"].as_int());
      Value::Map hello{{"client", options_.name}, {"plain", true}, {"resume", session_}};
      try {
        bridge_ = request(++last_id_, "JoinBridge", hello, deadline, "bridge");
      } catch (const SessionLost&) {  // away for too long: begin anew, without the old episodes
        hello["resume"] = "";
        bridge_ = request(++last_id_, "JoinBridge", hello, deadline, "bridge");
      }
    } catch (...) {
      connection_.reset();
      throw;
    }
    session_ = bridge_["session"].as_string();
    const Value::Array& open = bridge_["episodes"].as_array();
    for (auto* ids : {&not_taken_, &given_up_})
      for (auto it = ids->begin(); it != ids->end();) {  // what is over will not be told of
        const bool is_open = std::find(open.begin(), open.end(), Value(it->first)) != open.end();
        it = is_open ? std::next(it) : ids->erase(it);
      }
  }

  [[noreturn]] static void raise(const Value& failed) {
    const std::string &code = failed["code"].as_string(), &what = failed["message"].as_string();
    const std::string& type = failed["remote_type"].as_string();
    if (code == "timeout") throw TimeoutError(what);
    if (code == "peer_lost" || code == "not_joined") throw ConnectionLost(what);
    if (code == "overloaded") throw Overloaded(what);
    if (code == "no_peer" || code == "version" || code == "protocol") throw Refused(what);
    if (code != "remote") throw RemoteError(code + ": " + what);  // it is newer than this
    if (type == "Refused") throw Refused(what);
    if (type == "EpisodeNotFound") throw EpisodeNotFound(what);
    if (type == "EpisodeAlreadyStarted") throw EpisodeAlreadyStarted(what);
    if (type == "EpisodeFinished") throw EpisodeFinished(what);
    if (type == "EpisodeBusy") throw EpisodeBusy(what);
    if (type == "EpisodeLost") throw EpisodeLost(what);
    if (type == "SpaceMismatch") throw SpaceMismatch(what);
    if (type == "EpisodeError") throw EpisodeError(what);
    if (type == "SessionLost") throw SessionLost(what);
    throw RemoteError(type + ": " + what);
  }

  std::string host_;
  int port_;
  Options options_;
  std::unique_ptr<Connection> connection_;
  Value bridge_;
  Value complaint_;
  std::string session_;
  std::int64_t last_id_ = 0;
  /// By episode: the first GetAction whose action may come, and nobody takes it.
  std::map<std::string, std::int64_t> not_taken_;
  /// By episode: the last call that was given up, and may never have come.
  std::map<std::string, std::int64_t> given_up_;
  /// Of the last call that the bridge has refused.
  std::int64_t refused_id_ = 0;
  std::size_t limit_ = SIZE_MAX;
  double lease_ = 1.0;
  Clock::time_point forgotten_at_ = Clock::time_point::max();
};

}  // namespace envbus
