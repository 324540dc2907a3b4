// The attention of few new tokens to the paged cache of csrc/include/moeopt/paged_decode.cuh, as emulated_gate.cpp has
// the gate: with the CUDA functions `cuda_decode_layout` and `cuda_decode_run`.
#include <pybind11/pybind11.h>

#include <tuple>
#include <vector>

#include "bindings/from_python.h"
#include "emulated_device.h"
#include "launch/paged_decode.h"

using namespace moeopt;

namespace {

namespace py = pybind11;

py::dict emulate_layout(const py::dict& attention, int multiprocessors) {
  return to_python(paged_decode_launch(from_python<PagedDecodeArgs>("attention", attention), multiprocessors));
}

struct Write {
  uintptr_t to, from;
  size_t bytes;
};

// `writes`, of (to, from, bytes): what the launch before this one writes, which still runs when this one starts.
void emulate_run(const py::dict& attention, int multiprocessors, uint64_t seed, const py::list& writes) {
  const auto args = from_python<PagedDecodeArgs>("attention", attention);
  const PagedDecodeLaunch launch = paged_decode_launch(args, multiprocessors);
  std::vector<Write> before;
  for (const py::handle& write : writes) {
    const auto [to, from, bytes] = write.cast<std::tuple<uintptr_t, uintptr_t, size_t>>();
    before.push_back({to, from, bytes});
  }
  const auto kernel = args.head_size == 64 ? paged_decode_kernel<64> : paged_decode_kernel<128>;
  std::vector<emulation::Grid> grids;
  grids.push_back({launch.blocks, launch.threads, static_cast<size_t>(launch.shared_bytes), [&] { kernel(args); }});
  grids[0].follows = true;
  if (!before.empty()) {
    grids.push_back({static_cast<int>(before.size()), 32, 0, [&] {
                       if (thread_index() != 0) return;
                       for (int i = 0; i < 50; ++i) {  // long enough for what does not wait to come first
                         emulation::made_progress();
                         emulation::yield("its turn");
                       }
                       const Write& write = before[static_cast<size_t>(block_index())];
                       std::memcpy(reinterpret_cast<void*>(write.to), reinterpret_cast<void*>(write.from), write.bytes);
                     }});
  }
  const std::string failure = emulation::launch_together(grids, seed);
  if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace

PYBIND11_MODULE(emulated_decode, module) {
  module.def("cuda_decode_layout", &emulate_layout);
  module.def("cuda_decode_run", &emulate_run, py::arg("attention"), py::arg("multiprocessors"), py::arg("seed"),
             py::arg("writes") = py::list());
}
