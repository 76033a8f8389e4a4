// What Python sees.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "hooks.h"
#include "host.h"
#include "machine.h"

namespace simulated {

namespace {

std::map<std::string, uint64_t> take_counters() {
  Turn turn;
  const Counters counters = std::exchange(turn->counters, {});
  return {{"kernels", counters.kernels}, {"copies", counters.copies},
          {"records", counters.records}, {"waits", counters.waits},
          {"synchronisations", counters.synchronisations}, {"blocking", counters.blocking}};
}

void synchronise() {
  Turn turn;
  for (int device = 0; device < DEVICES; ++device) turn->clocks.host_waits_for_device(device);
}

void limit(int device, size_t capacity) {
  Turn turn;
  turn->capacity.at(device) = capacity;
}

size_t used(int device) {
  Turn turn;
  return turn->used.at(device);
}

std::set<int> contexts() {
  Turn turn;
  return turn->contexts;
}

// What the calling thread knows to be done, for another one to take over.
Clock known() {
  Turn turn;
  return host();
}

void take_over(const Clock& known) {
  Turn turn;
  host().join(known);
}

void listen(std::function<void(const std::string&)> on_race) {
  Turn turn;
  turn->on_race = std::move(on_race);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_hooks();
  watch_host();
  module.attr("DEVICES") = DEVICES;
  // Without Python's lock, since whoever has the machine may want it.
  using unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("take_counters", &take_counters, unlocked());
  module.def("synchronise", &synchronise, unlocked());
  module.def("limit", &limit, unlocked());
  module.def("used", &used, unlocked());
  module.def("contexts", &contexts, unlocked());
  pybind11::class_<Clock>(module, "Clock");
  module.def("known", &known, unlocked());
  module.def("take_over", &take_over, unlocked());
  module.def("listen", &listen);
}

}  // namespace simulated
