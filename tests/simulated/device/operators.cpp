// Every other operator: its accesses are checked, and the CPU computes what it gives, at once.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "checks.h"
#include "generator.h"
#include "tensors.h"

namespace simulated {

namespace {

// One call: what it uses on the device, and its arguments and results on the stack.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack& stack)
      : schema_(operation.schema()), name_(schema_.operator_name().name), stack_(stack),
        host_waits_(operation.hasTag(at::Tag::data_dependent_output) || operation.hasTag(at::Tag::dynamic_output_shape)) {
    if (name_.rfind("aten::", 0) == 0) name_ = name_.substr(6);
    const auto& arguments = schema_.arguments();
    const size_t first = stack.size() - arguments.size();
    for (size_t k = 0; k < arguments.size(); ++k) look(stack[first + k], arguments[k]);
    for (size_t k = 0; k < arguments.size(); ++k) draw_on_cpu(stack[first + k], arguments[k]);
    TORCH_CHECK(draws_ || !operation.hasTag(at::Tag::nondeterministic_seeded), name_,
                " draws from the generator of the CPU, which that of a simulated device cannot stand for");
  }

  // Where it runs: on the device of its first tensor, or else the one that it names, or else the current one.
  c10::Device device() const { return or_current(device_); }

  void check() const {
    Turn turn;
    const Moment moment = turn->clocks.launch(stream_for(device()));
    for (const auto& [tensor, written] : used_) {
      TORCH_CHECK(tensor.device() == device() || tensor.dim() == 0, "Expected all tensors to be on the same device: ",
                  name_, " got ", tensor.device(), " and ", device());
      if (written)
        check_write(block_of(tensor), moment, name_);
      else
        check_read(block_of(tensor), moment, name_);
    }
    ++turn->counters.kernels;
    if (!host_waits_) return;
    turn->clocks.host_waits(stream_for(device()));
    ++turn->counters.synchronisations;
  }

  // Put the results where they belong.
  void finish() {
    const size_t first = stack_.size() - schema_.returns().size();
    for (size_t k = first; k < stack_.size(); ++k) {
      auto& result = stack_[k];
      if (result.isTensor())
        result = on_device(result.toTensor());
      else if (result.isTensorList())
        result = mapped(result.toTensorVector(), [this](const at::Tensor& tensor) { return on_device(tensor); });
    }
  }

 private:
  template <typename Function>
  static std::vector<at::Tensor> mapped(std::vector<at::Tensor> tensors, Function function) {
    for (auto& tensor : tensors) tensor = function(tensor);
    return tensors;
  }

  // Put CPU tensors in the place of ours.
  void look(c10::IValue& value, const c10::Argument& argument) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const auto seen = [&](const at::Tensor& tensor) { return see(tensor, written); };
    if (value.isTensor()) {
      value = seen(value.toTensor());
    } else if (value.isTensorList()) {
      value = mapped(value.toTensorVector(), seen);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
        all.push_back(each ? std::optional<at::Tensor>(seen(*each)) : std::nullopt);
      value = all;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      device_ = or_current(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }

  void draw_on_cpu(c10::IValue& value, const c10::Argument& argument) {
    draws_ = draws_ || argument.name() == "generator";
    if (value.isGenerator())
      value = generator_on_cpu(value.toGenerator());
    else if (value.isNone() && argument.name() == "generator")
      value = generator_on_cpu(default_generator(device().index()));
  }

  at::Tensor see(const at::Tensor& tensor, bool written) {
    if (!is_simulated(tensor)) return tensor;
    if (!device_) device_ = tensor.device();
    used_.emplace_back(tensor, written);
    // The CPU may have to make an empty result larger, which it cannot with memory that is not its own.
    auto shared = written && tensor.numel() == 0 ? at::empty(tensor.sizes(), at::dtype(tensor.scalar_type())) : on_cpu(tensor);
    if (written) written_.emplace(shared.unsafeGetTensorImpl(), std::make_pair(shared, tensor));
    return shared;
  }

  at::Tensor on_device(const at::Tensor& result) const {
    if (!result.defined()) return result;
    const auto found = written_.find(result.unsafeGetTensorImpl());
    if (found == written_.end()) return new_on_device(result);
    const auto& argument = found->second.second;
    if (argument.sizes() != result.sizes()) replace(argument, result);
    return argument;
  }

  at::Tensor new_on_device(const at::Tensor& result) const {
    auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    on_cpu(made).copy_(result);
    Turn turn;
    check_write(block_of(made), turn->clocks.launch(stream_for(device())), name_);
    return made;
  }

  // The CPU gave an argument another size, and with it other memory.
  void replace(const at::Tensor& argument, const at::Tensor& result) const {
    const auto made = new_on_device(result.contiguous());
    argument.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
    argument.unsafeGetTensorImpl()->set_sizes_contiguous(result.sizes());
  }

  const c10::FunctionSchema& schema_;
  std::string name_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  // The host needs what was computed, for Python or for the size of a result.
  bool host_waits_;
  bool draws_ = false;
  std::vector<std::pair<at::Tensor, bool>> used_;
  std::map<const void*, std::pair<at::Tensor, at::Tensor>> written_;
};

void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Call call(operation, *stack);
  c10::DeviceGuard guard(call.device());
  call.check();
  DeviceWork work;
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  call.finish();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

}  // namespace simulated
