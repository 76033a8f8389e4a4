#pragma once

namespace simulated {

// From now on check what the host's own operators read and write of pinned memory, on every thread.
void watch_host();

}  // namespace simulated
