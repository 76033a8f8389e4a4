// The host's own operators: they may not read what a copy has yet to write, nor write what one has yet to read.
#include "host.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include "checks.h"
#include "tensors.h"

namespace simulated {

namespace {

bool is_on_host(const c10::IValue& value) { return value.isTensor() && value.toTensor().device().is_cpu(); }

// What computes on the CPU. Operators that are made of others say nothing: those follow. A copy to a device is one of
// the device's.
bool computes(const c10::OperatorName& name, c10::ArrayRef<c10::IValue> inputs) {
  if (name.name == "aten::copy_") return is_on_host(inputs[0]) && is_on_host(inputs[1]);
  const auto operation = c10::Dispatcher::singleton().findSchema(name);
  return operation && operation->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

void check(const at::Tensor& tensor, const c10::Argument& argument, const std::string& what) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return;
  const Block* block = block_of(tensor);
  if (block == nullptr || !block->pinned) return;
  if (argument.alias_info() == nullptr)
    check_host_read(*block, what);
  else if (argument.alias_info()->isWrite())
    check_host_write(*block, what);  // else it becomes a view
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  if (!name || DeviceWork::is_running() || !computes(*name, function.inputs())) return nullptr;
  const auto schema = function.operator_schema();
  const auto inputs = function.inputs();
  Turn turn;
  for (size_t k = 0; k < std::min(inputs.size(), schema->arguments().size()); ++k) {
    const auto& argument = schema->arguments()[k];
    if (inputs[k].isTensor()) check(inputs[k].toTensor(), argument, name->name.substr(6));
    if (inputs[k].isTensorList())
      for (const at::Tensor& tensor : inputs[k].toTensorVector()) check(tensor, argument, name->name.substr(6));
  }
  return nullptr;
}

}  // namespace

void watch_host() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace simulated
