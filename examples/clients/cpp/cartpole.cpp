// CartPoles that live in C++: g++ -std=c++17 -O2 -pthread cartpole.cpp -o cartpole
//                             ./cartpole HOST PORT [episodes] [token] [games at once]

#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <thread>

#include "envbus.hpp"

/// The physics of Gymnasium's CartPole-v1: a pole on a cart, pushed left (0) or right (1).
class CartPole {
 public:
  struct Result {
    std::vector<double> observation;
    double reward;
    bool terminated, truncated;
  };

  /// Begin an episode and return position, speed, angle and angular speed.
  std::vector<double> reset() {
    std::uniform_real_distribution<double> around(-0.05, 0.05);
    for (double& number : state_) number = around(random_);
    steps_ = 0;
    return observation();
  }

  Result step(std::int64_t action) {
    auto& [x, speed, angle, spin] = state_;
    const double force = action == 1 ? 10.0 : -10.0, cos = std::cos(angle), sin = std::sin(angle);
    const double push = (force + kPoleMass * kHalfLength * spin * spin * sin) / kMass;
    const double turn = (9.8 * sin - cos * push) /
                        (kHalfLength * (4.0 / 3.0 - kPoleMass * cos * cos / kMass));
    const double pull = push - kPoleMass * kHalfLength * turn * cos / kMass;
    x += kStep * speed;
    speed += kStep * pull;
    angle += kStep * spin;
    spin += kStep * turn;
    const bool terminated = std::abs(x) > 2.4 || std::abs(angle) > kMaxAngle;
    return {observation(), 1.0, terminated, !terminated && ++steps_ >= 500};
  }

 private:
  static constexpr double kPoleMass = 0.1, kMass = 1.1, kHalfLength = 0.5, kStep = 0.02;
  static constexpr double kMaxAngle = 12 * 2 * 3.141592653589793 / 360;

  std::vector<double> observation() const { return {state_.begin(), state_.end()}; }

  std::array<double, 4> state_{};
  int steps_ = 0;
  std::mt19937 random_{std::random_device{}()};
};

std::atomic<int> last_episode{0};

/// Play until there were so many episodes, of all games together. Return whether all went well.
bool play(const char* host, int port, const envbus::Options& options, int episodes) try {
  envbus::Client client(host, port, options);
  CartPole env;
  for (int number; (number = ++last_episode) <= episodes;) {
    const std::string id = "cpp-" + std::to_string(getpid()) + "-" + std::to_string(number);
    client.start_episode(id);
    CartPole::Result result{env.reset(), 0.0, false, false};
    int steps = 0;
    for (; !result.terminated && !result.truncated; ++steps) {
      result = env.step(client.get_action(id, result.observation).as_int());
      client.log_returns(id, result.reward);
    }
    client.end_episode(id, result.observation, result.truncated);
    std::ostringstream line;  // in one piece, as there are other games
    line << "episode " << id << ": " << steps << " steps\n";
    std::cout << line.str() << std::flush;
  }
  return true;
} catch (const envbus::Error& error) {
  std::cerr << "cartpole: " << error.what() << "\n";
  return false;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: cartpole HOST PORT [episodes] [token] [games at once]\n";
    return 2;
  }
  envbus::Options options;
  options.name = "cartpole-cpp";
  if (argc > 4) options.token = argv[4];
  const int episodes = argc > 3 ? std::atoi(argv[3]) : 10, games = argc > 5 ? std::atoi(argv[5]) : 1;
  std::atomic<bool> well{true};
  std::vector<std::thread> threads;  // a client makes one call at a time: one for each game
  for (int game = 0; game < games; ++game) {
    threads.emplace_back([&] {
      if (!play(argv[1], std::atoi(argv[2]), options, episodes)) well = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return well ? 0 : 1;
}
