#pragma once

#include <c10/core/Storage.h>

namespace simulated {

void register_hooks();

// Give a storage other memory, with what fits of its contents.
void resize(const c10::Storage& storage, size_t size);

}  // namespace simulated
