// Vector clocks: which work of which stream is known to be done before which.
//
// Every stream numbers the pieces of its work: kernels, copies, recorded events. The clock of a stream says, for each
// stream, up to which number work is done before whatever comes next on it. To wait for an event is to take over the
// clock of the stream that recorded it. Work is ordered after other work if its clock knows the number of that; whether
// it happened to run later plays no part.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace simulated {

constexpr int DEVICES = 3;
// Of each priority. After that many they are handed out again from the first, as torch does with CUDA's.
constexpr int POOL = 32;
// Number 0 of each device is its default stream; then come those of normal priority, and those of high priority.
constexpr int STREAMS = 1 + 2 * POOL;

// A stream of any device.
using Stream = int;

inline Stream stream_of(int device, int number) { return device * STREAMS + number; }
inline int device_of(Stream stream) { return stream / STREAMS; }
inline std::string name(Stream stream) {
  return "dev" + std::to_string(device_of(stream)) + "/s" + std::to_string(stream % STREAMS);
}

// One piece of work.
struct Moment {
  Stream stream;
  uint64_t number;
};

class Clock {
 public:
  bool knows(const Moment& moment) const { return numbers_[moment.stream] >= moment.number; }

  void join(const Clock& other) {
    for (size_t s = 0; s < numbers_.size(); ++s) numbers_[s] = std::max(numbers_[s], other.numbers_[s]);
    time_ = std::max(time_, other.time_);
  }

  Moment advance(Stream stream) { return {stream, ++numbers_[stream]}; }
  Moment now(Stream stream) const { return {stream, numbers_[stream]}; }

  // When all that this clock knows is done, in microseconds: a kernel, or a copy, takes one, and all streams run at once.
  uint64_t time() const { return time_; }
  void pass() { ++time_; }

 private:
  std::array<uint64_t, DEVICES * STREAMS> numbers_{};
  uint64_t time_ = 0;
};

// What the calling thread of the host has waited for, or was told by others that had. Only inside of a Turn.
Clock& host();

// The clocks of all streams.
class Clocks {
 public:
  // The next piece of work on a stream. What the thread has waited for was done before it was launched.
  Moment launch(Stream stream) {
    const Moment moment = mark(stream);
    streams_[stream].pass();
    return moment;
  }

  // The same for an event, which takes no time.
  Moment mark(Stream stream) {
    streams_[stream].join(host());
    return streams_[stream].advance(stream);
  }

  void wait(Stream stream, const Clock& event) { streams_[stream].join(event); }
  void host_waits(Stream stream) { host().join(streams_[stream]); }
  void host_waits_for_device(int device) {
    for (int k = 0; k < STREAMS; ++k) host_waits(stream_of(device, k));
  }

  const Clock& of(Stream stream) const { return streams_[stream]; }

 private:
  std::array<Clock, DEVICES * STREAMS> streams_;
};

}  // namespace simulated
