// Memory of the devices, and pinned memory of the host.
#pragma once

#include <c10/core/Allocator.h>

namespace simulated {

// Allocates on the current stream of the current device, as torch's caching allocators do.
c10::Allocator* device_memory();

c10::Allocator* pinned_memory();

bool is_pinned(const void* pointer);

}  // namespace simulated
