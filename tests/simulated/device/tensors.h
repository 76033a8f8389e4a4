// Tensors of a simulated device, and the CPU tensors that share their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "machine.h"

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

inline bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The stream that work on a device goes to now; only inside of a Turn.
inline Stream stream_for(c10::Device device) {
  begin_context(device.index());
  return current_stream(device.index());
}

c10::Device or_current(std::optional<c10::Device> device);

// The memory of a tensor; null if it has none, or none of ours.
Block* block_of(const at::Tensor& tensor);

// A CPU tensor with the same memory; other tensors as they are.
at::Tensor on_cpu(const at::Tensor& tensor);

// While one lives, this thread's operators on the CPU are the device's work, and not the host's.
class DeviceWork {
 public:
  DeviceWork();
  ~DeviceWork();
  static bool is_running();
};

}  // namespace simulated
