// Streams and events, as torch asks for them: what is current on a thread, and who waits for whom.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "machine.h"

namespace simulated {

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

Stream number(const c10::Stream& stream) { return stream_of(stream.device_index(), static_cast<int>(stream.id())); }

c10::Stream handle(int device, int number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), number);
}

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

struct Event {
  Clock clock;
  Moment moment;

  // Whether the calling thread has waited for it. Whoever did not wait cannot rely on it, however long ago it was recorded.
  bool ready() const { return host().knows(moment); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(TYPE, std::exchange(current_device(), static_cast<int>(device.index())));
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, current_device()); }
  void setDevice(c10::Device device) const override { current_device() = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device() = device.index(); }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return handle(index, current_stream(index) % STREAMS);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return handle(index_of(device), 0); }
  // As of CUDA, lower numbers are higher priorities.
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    static std::array<std::array<int, 2>, DEVICES> made{};
    Turn turn;
    const int index = index_of(device), high = priority < 0;
    begin_context(index);
    return handle(index, 1 + high * POOL + made[index][high]++ % POOL);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return handle(stream.device_index(), exchange_stream(stream.device_index(), static_cast<int>(stream.id())));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Turn turn;
    if (*event == nullptr) *event = new Event;
    begin_context(stream.device_index());
    const Moment moment = turn->clocks.mark(number(stream));
    *static_cast<Event*>(*event) = {turn->clocks.of(number(stream)), moment};
    ++turn->counters.records;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Turn turn;
    turn->clocks.wait(number(stream), static_cast<Event*>(event)->clock);
    ++turn->counters.waits;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* last, c10::DeviceIndex) const override {
    const auto &begin = *static_cast<Event*>(first), &end = *static_cast<Event*>(last);
    return (static_cast<double>(end.clock.time()) - static_cast<double>(begin.clock.time())) / 1e3;
  }

  bool queryEvent(void* event) const override {
    Turn turn;
    return event == nullptr || static_cast<Event*>(event)->ready();
  }
  bool queryStream(const c10::Stream& stream) const override {
    Turn turn;
    return host().knows(turn->clocks.of(number(stream)).now(number(stream)));
  }

  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Turn turn;
    host().join(static_cast<Event*>(event)->clock);
    ++turn->counters.synchronisations;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Turn turn;
    begin_context(stream.device_index());
    turn->clocks.host_waits(number(stream));
    ++turn->counters.synchronisations;
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Turn turn;
    const int index = device < 0 ? current_device() : device;
    begin_context(index);
    turn->clocks.host_waits_for_device(index);
    ++turn->counters.synchronisations;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Turn turn;
    if (Block* block = turn->blocks.find(data.get())) block->recorded.insert(number(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

}  // namespace simulated
