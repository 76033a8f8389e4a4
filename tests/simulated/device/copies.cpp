// Copies between the host and devices, ordered as CUDA orders them.
#include <ATen/ATen.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <torch/library.h>

#include "checks.h"
#include "tensors.h"

namespace simulated {

namespace {

// On the current stream of the source. That of the target waits for it, and it waits for what is queued there.
void between_devices(const at::Tensor& source, const at::Tensor& target, const std::string& what) {
  Turn turn;
  auto& clocks = turn->clocks;
  const Stream from = stream_for(source.device()), to = stream_for(target.device());
  clocks.launch(to);
  clocks.wait(from, clocks.of(to));
  const Moment moment = clocks.launch(from);
  check_read(block_of(source), moment, what);
  check_write(block_of(target), moment, what);
  clocks.wait(to, clocks.of(from));
  ++turn->counters.copies;
}

// The host waits, unless it was asked not to and its memory is pinned. From memory that is not, bytes are taken before
// the call returns, though they arrive later; to such memory the call returns when they are there.
void with_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking, const std::string& what) {
  Turn turn;
  const bool to_host = is_simulated(source);
  const Stream stream = stream_for(to_host ? source.device() : target.device());
  const Moment moment = turn->clocks.launch(stream);
  check_read(block_of(source), moment, what);
  check_write(block_of(target), moment, what);
  const bool pinned = block_of(to_host ? target : source) != nullptr;
  turn->counters.blocking += !non_blocking || !pinned;
  if (!non_blocking || (to_host && !pinned)) {
    turn->clocks.host_waits(stream);
    ++turn->counters.synchronisations;
  }
  ++turn->counters.copies;
}

void within_device(const at::Tensor& source, const at::Tensor& target, const std::string& what) {
  Turn turn;
  const Moment moment = turn->clocks.launch(stream_for(source.device()));
  check_read(block_of(source), moment, what);
  check_write(block_of(target), moment, what);
  ++turn->counters.kernels;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const std::string what = std::string("copy ") + (is_simulated(source) ? "D2" : "H2") + (is_simulated(target) ? "D" : "H");
  if (!is_simulated(source) || !is_simulated(target))
    with_host(source, target, non_blocking, what);
  else if (source.device() == target.device())
    within_device(source, target, what);
  else
    between_devices(source, target, what);
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  DeviceWork work;
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) {
  {
    Turn turn;
    const Stream stream = stream_for(tensor.device());
    check_read(block_of(tensor), turn->clocks.launch(stream), "item");
    turn->clocks.host_waits(stream);
    ++turn->counters.synchronisations;
  }
  DeviceWork work;
  return at::native::_local_scalar_dense_cpu(on_cpu(tensor));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
}

}  // namespace simulated
