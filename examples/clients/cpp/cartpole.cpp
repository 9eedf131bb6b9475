// A CartPole that lives in C++: g++ -std=c++17 -O2 cartpole.cpp -o cartpole
//                               ./cartpole HOST PORT [episodes] [token]

#include <array>
#include <cmath>
#include <cstdlib>
#include <iostream>

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

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: cartpole HOST PORT [episodes] [token]\n";
    return 2;
  }
  envbus::Options options;
  options.name = "cartpole-cpp";
  if (argc > 4) options.token = argv[4];
  try {
    envbus::Client client(argv[1], std::atoi(argv[2]), options);
    CartPole env;
    for (int number = 1; number <= (argc > 3 ? std::atoi(argv[3]) : 10); ++number) {
      const std::string episode = client.start_episode();
      CartPole::Result result{env.reset(), 0.0, false, false};
      int steps = 0;
      for (; !result.terminated && !result.truncated; ++steps) {
        result = env.step(client.get_action(episode, result.observation).as_int());
        client.log_returns(episode, result.reward);
      }
      client.end_episode(episode, result.observation, result.truncated);
      std::cout << "episode " << number << ": " << steps << " steps" << std::endl;
    }
  } catch (const envbus::Error& error) {
    std::cerr << "cartpole: " << error.what() << "\n";
    return 1;
  }
}
