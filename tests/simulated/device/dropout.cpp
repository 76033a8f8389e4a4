// Dropout of an accelerator is one operator that draws from the generator of its device.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace simulated {

namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask};
  mask.bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0. : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", &native_dropout); }

}  // namespace simulated
