#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <array>

#include "machine.h"

namespace simulated {

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device, at::Generator inner = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device().index(), inner.clone()); }

  at::Generator inner;
};

at::Tensor rng_state(int64_t device) { return default_generator(static_cast<int>(device)).get_state(); }

void set_rng_state(const at::Tensor& state, int64_t device) {
  at::Generator generator = default_generator(static_cast<int>(device));
  generator.set_state(state);
}

void manual_seed(int64_t seed, int64_t device) {
  at::Generator generator = default_generator(static_cast<int>(device));
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::array<at::Generator, DEVICES>;
    for (int k = 0; k < DEVICES; ++k) (*made)[k] = new_generator(k);
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator generator_on_cpu(const at::Generator& generator) {
  if (generator.device().type() != TYPE) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// As operators, since Python has no name for the default generator of such a device.
TORCH_LIBRARY(simulated, m) {
  m.def("rng_state", &rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("manual_seed", &manual_seed);
}

}  // namespace simulated
