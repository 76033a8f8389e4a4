// What is a race: an access that is not ordered after one that it conflicts with.
#pragma once

#include "machine.h"

namespace simulated {

// Work on a stream reads or writes a block; null: memory that is none of ours.
void check_read(Block* block, Moment moment, const std::string& what);
void check_write(Block* block, Moment moment, const std::string& what);

// The host reads or writes a block of pinned memory, now.
void check_host_read(const Block& block, const std::string& what);
void check_host_write(const Block& block, const std::string& what);

// A block is freed. It is not looked at when its memory is handed out again but now, since another thread might
// allocate just afterwards.
void check_free(const Block& block);

}  // namespace simulated
