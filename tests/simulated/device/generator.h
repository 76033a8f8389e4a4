// The random generator of a device: one of the CPU's, since that is what computes.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

at::Generator new_generator(int device);
const at::Generator& default_generator(int device);

// What the CPU's operators draw from instead.
at::Generator generator_on_cpu(const at::Generator& generator);

}  // namespace simulated
