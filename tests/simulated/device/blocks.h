// Blocks of memory: what wrote each last, and what has read it since.
#pragma once

#include <map>
#include <set>
#include <string>

#include "clocks.h"

namespace simulated {

struct Access {
  Moment moment;
  std::string what;

  std::string text() const { return what + " on " + name(moment.stream); }
};

struct Block {
  size_t size = 0;
  // The stream that was current at the allocation. Freed memory goes back to it at once, for whatever it does next.
  Stream home = 0;
  // Pinned memory of the host, which devices copy from and to asynchronously.
  bool pinned = false;
  Access written{{0, 0}, "allocation"};
  std::map<Stream, Access> read;
  // The allocator waits for the streams that record_stream() named.
  std::set<Stream> recorded;
};

class Blocks {
 public:
  void add(const void* begin, Block block) { blocks_[address(begin)] = std::move(block); }
  void remove(const void* begin) { blocks_.erase(address(begin)); }
  void clear() { blocks_.clear(); }

  // The block that a pointer points into; null if the memory is none of ours.
  Block* find(const void* pointer) {
    auto next = blocks_.upper_bound(address(pointer));
    if (next == blocks_.begin()) return nullptr;
    auto& [begin, block] = *std::prev(next);
    return address(pointer) < begin + block.size ? &block : nullptr;
  }

 private:
  static const char* address(const void* pointer) { return static_cast<const char*>(pointer); }

  std::map<const char*, Block> blocks_;
};

}  // namespace simulated
