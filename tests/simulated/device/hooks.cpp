// What torch asks of a kind of device as a whole.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "generator.h"
#include "machine.h"
#include "memory.h"

namespace simulated {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    Turn turn;
    return turn->contexts.count(device) > 0;
  }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }

  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device() = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device(), static_cast<int>(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize(storage, size); }
};

}  // namespace

void resize(const c10::Storage& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto data = device_memory()->allocate(size);
  std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

void register_hooks() {
  static auto* only = new Hooks;
  at::RegisterPrivateUse1HooksInterface(only);
}

}  // namespace simulated
