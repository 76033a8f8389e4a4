// The operators that make tensors and views: they start no work.
#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "hooks.h"
#include "memory.h"

namespace simulated {

namespace {

thread_local int working = 0;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(sizes, device_memory(), KEYS, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, device_memory(), KEYS, dtype.value_or(at::kFloat));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->expect_int();
  return at::cpu::as_strided(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), begin);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

const at::Tensor& resize_tensor(const at::Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  const size_t needed = at::detail::computeStorageNbytesContiguous(shape, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  auto* bare = tensor.unsafeGetTensorImpl();
  bare->set_storage_keep_dtype(std::move(storage));
  bare->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return tensor;
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  Turn turn;
  if (Block* block = block_of(tensor)) block->recorded.insert(stream_of(stream.device_index(), stream.id()));
}

}  // namespace

c10::Device or_current(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? *device : c10::Device(TYPE, current_device());
}

Block* block_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? machine().blocks.find(tensor.storage().data()) : nullptr;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  auto* begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(begin, tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()));
}

DeviceWork::DeviceWork() { ++working; }
DeviceWork::~DeviceWork() { --working; }
bool DeviceWork::is_running() { return working > 0; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_tensor);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
}

}  // namespace simulated
