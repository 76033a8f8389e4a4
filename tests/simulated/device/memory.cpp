#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "checks.h"

namespace simulated {

namespace {

void* reserve(size_t size) { return std::malloc(std::max<size_t>(size, 1)); }

void release(void* begin) {
  if (begin == nullptr) return;
  {
    Turn turn;
    if (const Block* block = turn->blocks.find(begin)) {
      check_free(*block);
      if (!block->pinned) turn->used[device_of(block->home)] -= block->size;
      turn->blocks.remove(begin);
    }
  }
  std::free(begin);
}

void expect_room(int device, size_t size) {
  const auto used = machine().used[device], capacity = machine().capacity[device];
  TORCH_CHECK_WITH(OutOfMemoryError, capacity == 0 || used + size <= capacity, "simulated device ", device,
                   " out of memory: tried to allocate ", size, " bytes, of ", capacity, " are ", used, " in use");
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = current_device();
    Block block;
    block.size = std::max<size_t>(size, 1);
    Turn turn;
    begin_context(device);
    expect_room(device, block.size);
    turn->used[device] += block.size;
    block.home = current_stream(device);
    // It may be memory that work queued on this stream still uses: another stream has to wait for that.
    block.written = {turn->clocks.of(block.home).now(block.home), "allocation"};
    void* begin = reserve(size);
    turn->blocks.add(begin, std::move(block));
    return {begin, begin, &release, c10::Device(c10::DeviceType::PrivateUse1, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Block block;
    block.size = std::max<size_t>(size, 1);
    block.pinned = true;
    void* begin = reserve(size);
    Turn turn;
    // By way of a device that the process uses; of the current one, if there is none.
    if (turn->contexts.empty()) begin_context(current_device());
    turn->blocks.add(begin, std::move(block));
    return {begin, begin, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

}  // namespace

c10::Allocator* device_memory() {
  static auto* only = new DeviceMemory;
  return only;
}

c10::Allocator* pinned_memory() {
  static auto* only = new PinnedMemory;
  return only;
}

bool is_pinned(const void* pointer) {
  Turn turn;
  const Block* block = turn->blocks.find(pointer);
  return block != nullptr && block->pinned;
}

}  // namespace simulated
