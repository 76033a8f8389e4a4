#include "checks.h"

namespace simulated {

namespace {

const Clock& clock_of(Stream stream) { return machine().clocks.of(stream); }

bool ordered(const Access& first, Stream stream) { return clock_of(stream).knows(first.moment); }

void not_ordered(const std::string& kind, const Access& later, const std::string& after) {
  found(kind + " by " + later.text() + " not ordered after " + after);
}

}  // namespace

void check_read(Block* block, Moment moment, const std::string& what) {
  if (block == nullptr) return;
  Access access{moment, what};
  if (!ordered(block->written, moment.stream)) not_ordered("READ", access, block->written.text());
  block->read[moment.stream] = access;  // earlier ones on this stream are done before it
}

void check_write(Block* block, Moment moment, const std::string& what) {
  if (block == nullptr) return;
  Access access{moment, what};
  if (!ordered(block->written, moment.stream)) not_ordered("WRITE", access, block->written.text());
  for (const auto& [stream, read] : block->read)
    if (!ordered(read, moment.stream)) not_ordered("WRITE", access, "READ by " + read.text());
  block->written = access;
  block->read.clear();
}

void check_host_read(const Block& block, const std::string& what) {
  if (!host().knows(block.written.moment))
    found("READ by " + what + " on the host not ordered after " + block.written.text());
}

void check_host_write(const Block& block, const std::string& what) {
  if (!host().knows(block.written.moment))
    found("WRITE by " + what + " on the host not ordered after " + block.written.text());
  for (const auto& [stream, read] : block.read)
    if (!host().knows(read.moment)) found("WRITE by " + what + " on the host not ordered after READ by " + read.text());
}

void check_free(const Block& block) {
  if (block.pinned) return;  // torch's allocator of pinned memory waits for the copies that it saw
  // Of each recorded stream the allocator waits for all that is queued there, and so for what that waits for.
  Clock known = clock_of(block.home);
  known.join(host());
  for (const Stream each : block.recorded) known.join(clock_of(each));
  auto check = [&](const Access& access) {
    if (!known.knows(access.moment))
      found("FREE of memory of " + name(block.home) + " not ordered after " + access.text() + " (no record_stream)");
  };
  check(block.written);
  for (const auto& [stream, read] : block.read) check(read);
}

}  // namespace simulated
