// Calls each verb of the C++ client as an author would, and each error on purpose.
// checks HOST PORT single|agents|reconnect|large|refused|messagepack [token]

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "envbus.hpp"

using envbus::Client;
using envbus::Value;
using Map = envbus::Value::Map;

#define CHECK(condition) \
  if (!(condition)) throw std::logic_error("line " + std::to_string(__LINE__) + ": " #condition)

template <typename Wanted, typename Call>
std::string rejected(Call call) {
  try {
    call();
  } catch (const Wanted& error) {
    return error.what();
  }
  throw std::logic_error("nothing was thrown");
}

bool contains(const std::string& text, const char* part) { return text.find(part) != text.npos; }

const std::vector<double> kObservation{0, 0.5, -1, 2}, kSilence{99, 0, 0, 0}, kFailure{98, 0, 0, 0};

void single(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  CHECK(!client.bridge()["multi_agent"].as_bool());
  CHECK(client.bridge()["policy_ids"] == Value{"default_policy"});
  CHECK(client.bridge()["observation_space"]["space"].as_string() == "Box");

  CHECK(client.start_episode("own") == "own");
  rejected<envbus::EpisodeAlreadyStarted>([&] { client.start_episode("own"); });
  CHECK(client.get_action("own", kObservation).as_int() == 0);
  const Map info{{"level", "é"}, {"lives", {3, -70000, 1L << 40, nullptr, true}}};
  client.log_returns("own", 1.5, info);
  client.log_returns("own", 2);
  CHECK(client.get_action("own", std::vector<float>{0, 0, 1, 0}).as_int() == 1);
  client.log_action("own", kObservation, 1);
  client.log_returns("own", -0.25);
  client.end_episode("own", kObservation);
  rejected<envbus::EpisodeFinished>([&] { client.get_action("own", kObservation); });
  rejected<envbus::EpisodeFinished>([&] { client.start_episode("own"); });
  rejected<envbus::EpisodeNotFound>([&] { client.get_action("strange", kObservation); });

  const std::string cut = client.start_episode("cut", false);
  rejected<envbus::SpaceMismatch>([&] { client.get_action(cut, {1, 2, 3}); });
  CHECK(contains(rejected<envbus::EpisodeError>([&] { client.log_action(cut, kObservation, 2); }),
                 "expected Discrete(2)"));
  rejected<envbus::TimeoutError>([&] { client.get_action(cut, kSilence, 0.2); });
  CHECK(contains(rejected<envbus::RemoteError>([&] { client.get_action(cut, kFailure); }),
                 "ArithmeticError: the policy fails"));
  CHECK(client.get_action(cut, kObservation).as_int() == 0);
  client.end_episode(cut, kObservation, true);

  const std::string one = client.start_episode(), other = client.start_episode();
  CHECK(one != other);
  CHECK(client.get_action(one, {0, 0, 1, 0}).as_int() == 1);
  CHECK(client.get_action(other, {0, 0, -1, 0}).as_int() == 0);
  client.heartbeat();
  client.end_episode(other, kObservation);
  client.end_episode(one, kObservation);
}

void agents(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  CHECK(client.bridge()["multi_agent"].as_bool());
  const std::string episode = client.start_episode("team");
  const Map left{{"left", {0, 0, 1, 0}}}, right{{"right", {0, 0, -1, 0}}};
  Map both = left;
  both.insert(right.begin(), right.end());
  CHECK(client.get_action(episode, both) == (Map{{"left", 1}, {"right", 0}}));
  client.log_returns(episode, Map{{"left", 1}, {"right", 2}},
                     Map{{"left", Map{{"hit", true}}}}, Map{{"left", true}});
  CHECK(client.get_action(episode, right) == (Map{{"right", 0}}));
  client.log_returns(episode, Map{{"right", 4}});
  client.end_episode(episode, right, false, nullptr, Map{{"right", true}});
}

// The gateway is killed when "ready" is printed: the question that is in flight is asked again.
void reconnect(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  const std::string episode = client.start_episode("survivor");
  client.get_action(episode, kObservation);
  std::cout << "ready" << std::endl;
  CHECK(client.get_action(episode, {97, 0, 1, 0}).as_int() == 1);
  client.log_returns(episode, 3);
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  CHECK(client.bridge()["episodes"] == Value{"survivor"});
  client.end_episode(episode, kObservation);
}

// Sleeps for longer than the bridge bears: the client is forgotten, comes back, and goes on.
void pause(const char* host, int port, envbus::Options options) {
  options.heartbeat = 0.2;
  Client client(host, port, options);
  const std::string episode = client.start_episode("sleeper");
  std::this_thread::sleep_for(std::chrono::milliseconds(1900));
  client.log_returns(episode, 3);
  for (int i = 0; i < 12; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    client.heartbeat();
  }
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  client.end_episode(episode, kObservation);
}

// The second action is lost on its way: the client says that it did not take it.
void late(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  const std::string episode = client.start_episode("late");
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  rejected<envbus::TimeoutError>([&] { client.get_action(episode, kObservation, 1.0); });
  client.log_returns(episode, 5);
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  client.log_returns(episode, 1);
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  client.end_episode(episode, kObservation);
}

// The first rewards never come: the step that they are of is no row.
void lost(const char* host, int port, envbus::Options options) {
  options.timeout = 3;  // a busy machine takes its time to connect
  Client client(host, port, options);
  const std::string episode = client.start_episode("lost");
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  rejected<envbus::TimeoutError>([&] { client.log_returns(episode, 5); });
  client.log_returns(episode, 1);
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  client.end_episode(episode, kObservation);
}

// The bridge is stopped when "ready" is printed: who waits is told at once.
void stopped(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  const std::string episode = client.start_episode();
  std::cout << "ready" << std::endl;
  rejected<envbus::ConnectionLost>([&] { client.get_action(episode, kSilence); });
  rejected<envbus::ConnectionLost>([&] { client.get_action(episode, kObservation, 0.5); });
}

// The bridge is killed when "ready" is printed, and another one is at its address.
void replaced(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  const std::string old = client.start_episode();
  std::cout << "ready" << std::endl;
  rejected<envbus::EpisodeNotFound>([&] { client.get_action(old, kSilence); });
  const std::string episode = client.start_episode("next");
  CHECK(client.get_action(episode, kObservation).as_int() == 0);
  client.end_episode(episode, kObservation);
}

// Pictures of 320 x 240 as bytes and as numbers; and what is over the gateway's limit.
void large(const char* host, int port, const envbus::Options& options) {
  Client client(host, port, options);
  const std::string episode = client.start_episode("pictures");
  CHECK(client.get_action(episode, Value::Bytes(240 * 320 * 3, 200)).as_int() == 0);
  const std::string told = rejected<envbus::MessageTooLarge>(
      [&] { client.log_returns(episode, 1, Map{{"text", std::string(5000000, 'x')}}); });
  CHECK(contains(told, "LogReturns: a message of 5000"));
  CHECK(contains(told, "bytes is over the gateway's limit of 4194304"));
  const Value::Array picture(240, Value::Array(320, {255, 128, 0}));
  CHECK(client.get_action(episode, picture).as_int() == 0);
  client.end_episode(episode, Value::Bytes(240 * 320 * 3));
}

void refused(const char* host, int port, envbus::Options options) {
  CHECK(contains(rejected<envbus::Refused>([&] { Client(host, port, options); }), "token is wanted"));
  options.token = "guess";
  CHECK(contains(rejected<envbus::Refused>([&] { Client(host, port, options); }), "token is wrong"));
  options.timeout = 0.5;  // for so long it would wait for a bridge
  rejected<envbus::ConnectionLost>([&] { Client(host, 1, options); });
  rejected<envbus::ConnectionLost>([&] { Client("no.such.host.invalid", port, options); });
}

// Who is there sends what cannot be read, and leaves the connection open.
void nonsense(const char* host, int port, envbus::Options options) {
  rejected<envbus::ValueError>([&] { Client(host, port, options); });
}

// Who is there announces 4 GB and sends without end.
void huge(const char* host, int port, envbus::Options options) {
  rejected<envbus::Refused>([&] { Client(host, port, options); });
}

// Who is there sends late answers without end.
void flood(const char* host, int port, envbus::Options options) {
  options.timeout = 2.0;  // a busy machine takes its time to connect
  rejected<envbus::TimeoutError>([&] { Client(host, port, options); });
}

// Who is there fails the first request with an error whose name all objects have.
void failure(const char* host, int port, envbus::Options options) {
  rejected<envbus::RemoteError>([&] { Client(host, port, options); });
}

// Who is there answers the first request with nil.
void nil(const char* host, int port, envbus::Options options) {
  rejected<envbus::ValueError>([&] { Client(host, port, options); });
}

void messagepack() {
  const std::int64_t smallest = std::int64_t(1) << 63;
  Map large;
  for (int i = 0; i < 70000; ++i) large[std::to_string(i)] = i;
  for (const Value& value : Value::Array{
           nullptr, true, false, 0, 127, 128, 255, 256, 65535, 65536, 4294967295, 4294967296, -1, -32, -33,
           -128, -32768, -32769, -2147483648, -2147483649, smallest, ~smallest, UINT64_MAX, 0.1,
           -1e300,
           INFINITY, "", std::string(31, 'x'), std::string(40, 'x'), std::string(300, 'x'),
           std::string(70000, 'x'), envbus::Value::Bytes(300), envbus::Value::Bytes(70000),
           Value::Array(20, Value{1}), Value::Array(70000), Map{}, large, Map{{"a", Map{{"b", 1}}}}})
    CHECK(envbus::unpack(envbus::pack(value)) == value);
  for (const auto& [number, size] : std::map<std::int64_t, std::size_t>{
           {127, 1}, {128, 2}, {255, 2}, {256, 3}, {-33, 3}, {65536, 5}, {-32769, 5}})
    CHECK(envbus::pack(number).size() == size);
  CHECK(envbus::unpack(envbus::pack(UINT64_MAX)).as_uint() == UINT64_MAX && Value(3u).as_uint() == 3);
  CHECK(Value(UINT64_MAX).as_float() > 1.8e19);
  rejected<envbus::ValueError>([] { Value(UINT64_MAX).as_int(); });
  rejected<envbus::ValueError>([] { Value(-1).as_uint(); });
  const Value::Bytes packed = envbus::pack(Map{{"a", {"text", 1.5, 70000}}, {"b", std::string(40, 'x')}});
  for (std::size_t size = 0; size < packed.size(); ++size)
    rejected<envbus::ValueError>([&] { envbus::unpack({packed.begin(), packed.begin() + size}); });
  rejected<envbus::ValueError>([] { envbus::unpack({0xc7, 1, 2, 3}); });
  rejected<envbus::ValueError>([] { envbus::unpack({0xdd, 0xff, 0xff, 0xff, 0xff}); });
  rejected<envbus::ValueError>([] { envbus::unpack(Value::Bytes(1000, 0x91)); });
}

int main(int, char** argv) try {
  const char* host = argv[1];
  const int port = std::atoi(argv[2]);
  const std::string what = argv[3];
  envbus::Options options;
  options.token = argv[4];
  if (what == "single") single(host, port, options);
  else if (what == "agents") agents(host, port, options);
  else if (what == "reconnect") reconnect(host, port, options);
  else if (what == "pause") pause(host, port, options);
  else if (what == "late") late(host, port, options);
  else if (what == "lost") lost(host, port, options);
  else if (what == "stopped") stopped(host, port, options);
  else if (what == "replaced") replaced(host, port, options);
  else if (what == "large") large(host, port, options);
  else if (what == "refused") refused(host, port, options);
  else if (what == "nonsense") nonsense(host, port, options);
  else if (what == "huge") huge(host, port, options);
  else if (what == "flood") flood(host, port, options);
  else if (what == "failure") failure(host, port, options);
  else if (what == "nil") nil(host, port, options);
  else if (what == "messagepack") messagepack();
  else throw std::logic_error("there is no check " + what);
  std::cout << "passed: " << what << std::endl;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
