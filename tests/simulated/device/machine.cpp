#include "machine.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <utility>

namespace simulated {

namespace {

thread_local std::vector<std::string> races;
thread_local int device = 0;
thread_local std::array<int, DEVICES> numbers{};

struct Host final : c10::DebugInfoBase {
  Clock clock;
};

}  // namespace

Machine& machine() {
  static auto* only = new Machine;  // never destroyed: tensors may die later than static objects
  return *only;
}

Turn::~Turn() {
  lock_.unlock();
  if (races.empty()) return;
  std::vector<std::string> mine;
  mine.swap(races);
  for (const auto& race : mine) machine().on_race(race);
}

// In torch's own state of a thread, since autograd gives that to its threads: what one of them has waited for, whoever
// called the backward knows, and the other way round. Python's threads tell each other by take_over().
Clock& host() {
  const auto KIND = c10::DebugInfoKind::TEST_INFO;
  if (c10::ThreadLocalDebugInfo::get(KIND) == nullptr)
    c10::ThreadLocalDebugInfo::_push(KIND, std::make_shared<Host>());
  return static_cast<Host*>(c10::ThreadLocalDebugInfo::get(KIND))->clock;
}

void begin_context(int device) { machine().contexts.insert(device); }

void found(std::string race) {
  if (machine().on_race) races.push_back(std::move(race));
}

int& current_device() { return device; }

Stream current_stream(int device) { return stream_of(device, numbers[device]); }

int exchange_stream(int device, int number) { return std::exchange(numbers[device], number); }

}  // namespace simulated
