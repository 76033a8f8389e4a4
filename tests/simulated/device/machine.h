// The one simulated machine of the process: its clocks and its memory, and who may use them.
#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <vector>

#include "blocks.h"
#include "clocks.h"

namespace simulated {

struct Counters {
  uint64_t kernels = 0;
  uint64_t copies = 0;
  uint64_t records = 0;
  uint64_t waits = 0;
  // How often the host had to wait.
  uint64_t synchronisations = 0;
  // Copies from and to the host that hold it up: nobody asked for asynchronous ones, or the host's memory is not pinned.
  uint64_t blocking = 0;
};

struct Machine {
  std::mutex mutex;
  Clocks clocks;
  Blocks blocks;
  Counters counters;
  std::array<size_t, DEVICES> used{};
  // Bytes that each device has.
  std::array<size_t, DEVICES> capacity{};
  // Devices with a context of this process, which takes some hundred megabytes of a GPU: those that it has used.
  std::set<int> contexts;
  // Told of each race, by the thread that did the later half of it.
  std::function<void(const std::string&)> on_race;
};

Machine& machine();

// The right to use the machine, for the length of a block. What is found is told at its end: whoever listens needs
// Python's lock, and a thread that has that one may be waiting for the machine.
class Turn {
 public:
  Turn() : lock_(machine().mutex) {}
  ~Turn();

  Machine* operator->() { return &machine(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Say that a race was found; only inside of a Turn.
void found(std::string race);

// This process uses a device; only inside of a Turn.
void begin_context(int device);

// Of this thread.
int& current_device();
Stream current_stream(int device);
int exchange_stream(int device, int number);

}  // namespace simulated
