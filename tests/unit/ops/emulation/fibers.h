// A grid of GPU threads as fibers of one CPU thread: every thread of every block is a fiber that runs until it has to
// wait. A seeded random choice says who runs next and when an asynchronous copy lands, so that code which relies on an
// order nobody promised fails for some seed. Where the launch asks for clusters of two, blocks 2i and 2i + 1 are one.
// When nobody can go on, the run ends with a list of who waits for what. Grids that may overlap run together: the
// second does not wait for the first, as where programmatic dependent launch lets it start.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {

struct Barrier {  // bar.sync and __syncwarp: opens when all have come
  int arrived = 0;
  uint64_t generation = 0;
};

struct MBarrier {
  int64_t expected = 0, pending = 0, bytes = 0;
  uint64_t phase = 0;
  bool live = false;
};

struct WgmmaOp {
  float* d;
  int columns;
  bool a_in_registers;
  const uint32_t* a_registers;
  uint64_t a, b;
  bool accumulate;
  bool fp8;
};

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
  bool valid;
};

struct Grid {
  int blocks, threads;
  size_t shared_bytes;
  std::function<void()> kernel;
  int block_y = 0, cluster_blocks = 1;
};

struct Block {
  int index = 0;  // in its grid
  const Grid* grid = nullptr;
  size_t cluster = 0;  // where the first block of its cluster lies in the machine
  std::vector<unsigned char> storage;
  unsigned char* shared = nullptr;
  std::map<int, Barrier> named;
  std::vector<Barrier> warps;
  std::vector<uint32_t> exchange;  // [warp][lane][8]
  std::map<uint32_t, MBarrier> mbarriers;
  Barrier all_of_cluster;  // the first block's
};

// A fiber that waits for a number is not woken, which costs a hundred times as much as this look, before it changes.
struct Unchanged {
  const uint64_t* number = nullptr;
  uint64_t mask = 0, value = 0;
  bool holds() const { return number != nullptr && (*number & mask) == value; }
};

struct Fiber {
  ucontext_t first;  // where it starts
  jmp_buf context;
  bool started = false;
  char* stack = nullptr;
  Block* block = nullptr;
  int thread = 0;
  bool done = false;
  const char* waits_for = "start";
  Unchanged until;
  std::vector<AsyncCopy> open_copies;
  std::vector<WgmmaOp> open_wgmma;
  std::vector<std::vector<WgmmaOp>> wgmma_groups;
};

constexpr size_t kStackBytes = 96 * 1024;

struct Machine {
  uint64_t random_state = 1;
  uint64_t progress = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::function<void()>> in_flight;  // copies of the copy engine
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::string failure;

  uint64_t random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
  }
};

inline Machine*& machine() {
  static Machine* instance = nullptr;
  return instance;
}

inline void made_progress() { ++machine()->progress; }

// Unlike swapcontext, the jumps do not ask the system for the signal mask: the switches are most of a run.
inline void resume(Machine& m, Fiber* fiber) {
  m.current = fiber;
  if (_setjmp(m.scheduler)) return;
  if (fiber->started) _longjmp(fiber->context, 1);
  fiber->started = true;
  setcontext(&fiber->first);
}

inline void leave(Machine& m) {
  if (!_setjmp(m.current->context)) _longjmp(m.scheduler, 1);
}

inline void yield(const char* waits_for, Unchanged until = {}) {
  Machine& m = *machine();
  m.current->waits_for = waits_for;
  m.current->until = until;
  leave(m);
}

inline void fail(const std::string& message) {
  Machine& m = *machine();
  if (m.failure.empty()) {
    m.failure = "block " + std::to_string(m.current->block->index) + ", thread " + std::to_string(m.current->thread) +
                ": " + message;
  }
  m.current->done = true;
  leave(m);
}

inline void fiber_main() {
  for (;;) {  // one round for each launch that has it
    Machine& m = *machine();
    m.current->block->grid->kernel();
    if (!m.current->open_copies.empty() || !m.current->wgmma_groups.empty())
      fail("ends with asynchronous work pending");
    m.current->done = true;
    made_progress();
    leave(m);
  }
}

// Fibers that have ended their kernel, for the next launch: stacks and contexts are made by the system.
inline std::vector<std::unique_ptr<Fiber>>& rested_fibers() {
  static std::vector<std::unique_ptr<Fiber>> rested;
  return rested;
}

inline std::unique_ptr<Fiber> make_fiber(Block* block, int thread) {
  auto& rested = rested_fibers();
  std::unique_ptr<Fiber> fiber;
  if (rested.empty()) {
    fiber = std::make_unique<Fiber>();
    fiber->stack = static_cast<char*>(
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack;
    fiber->first.uc_stack.ss_size = kStackBytes;
    fiber->first.uc_link = nullptr;  // fiber_main does not return
    makecontext(&fiber->first, fiber_main, 0);
  } else {
    fiber = std::move(rested.back());
    rested.pop_back();
    fiber->done = false;
    fiber->waits_for = "start";
    fiber->until = {};
  }
  fiber->block = block;
  fiber->thread = thread;
  return fiber;
}

inline void land_copies(Machine& m, bool all) {
  for (size_t i = 0; i < m.in_flight.size();) {
    if (all || m.random() % 16 == 0) {
      std::function<void()> copy = std::move(m.in_flight[i]);
      m.in_flight[i] = std::move(m.in_flight.back());
      m.in_flight.pop_back();
      copy();
      made_progress();
    } else {
      ++i;
    }
  }
}

inline std::string waiting_list(const Machine& m) {
  std::map<std::string, int> counts;
  for (const auto& fiber : m.fibers) {
    if (!fiber->done) ++counts["block " + std::to_string(fiber->block->index) + ": " + fiber->waits_for];
  }
  std::string text = "deadlock:";
  for (const auto& [what, count] : counts) text += " [" + what + " x" + std::to_string(count) + "]";
  return text;
}

inline void add_blocks(Machine& m, const Grid& grid) {
  for (int b = 0; b < grid.blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->index = b;
    block->grid = &grid;
    block->cluster = m.blocks.size() - static_cast<size_t>(b % grid.cluster_blocks);
    block->storage.resize(grid.shared_bytes + 1024);
    for (auto& byte : block->storage) byte = 0xff;  // NaN in every format: unwritten memory must not be used
    const auto address = reinterpret_cast<uintptr_t>(block->storage.data());
    block->shared = block->storage.data() + (1024 - address % 1024) % 1024;
    block->warps.resize(grid.threads / 32);
    block->exchange.resize(static_cast<size_t>(grid.threads) * 8);
    for (int t = 0; t < grid.threads; ++t) {
      m.fibers.push_back(make_fiber(block.get(), t));
    }
    m.blocks.push_back(std::move(block));
  }
}

// Runs the grids; returns an empty string, or what went wrong. All blocks are resident.
inline std::string launch_together(const std::vector<Grid>& grids, uint64_t seed) {
  Machine m;
  machine() = &m;
  m.random_state = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  for (const Grid& grid : grids) {
    if (grid.blocks % grid.cluster_blocks) return "the grid is not a multiple of the cluster";
    add_blocks(m, grid);
  }
  std::vector<Fiber*> ready;
  for (auto& fiber : m.fibers) ready.push_back(fiber.get());
  int idle_rounds = 0;
  while (!ready.empty() && m.failure.empty()) {
    const uint64_t before = m.progress;
    // A warp's threads run one after another, warps in random order: cheap, and what hardware may do.
    const size_t start = m.random() % ready.size();
    const bool backwards = m.random() % 2;
    for (size_t i = 0; i < ready.size() && m.failure.empty(); ++i) {
      const size_t at = (start + (backwards ? ready.size() - i : i)) % ready.size();
      if (ready[at]->done || ready[at]->until.holds()) continue;
      resume(m, ready[at]);
    }
    land_copies(m, idle_rounds > 1);
    size_t kept = 0;
    for (Fiber* fiber : ready) {
      if (!fiber->done) ready[kept++] = fiber;
    }
    ready.resize(kept);
    idle_rounds = m.progress == before ? idle_rounds + 1 : 0;
    if (idle_rounds > 8 && m.in_flight.empty()) m.failure = waiting_list(m);
  }
  if (m.failure.empty() && !m.in_flight.empty()) m.failure = "the grid ended with copies in flight";
  for (auto& fiber : m.fibers) {
    if (m.failure.empty()) {
      rested_fibers().push_back(std::move(fiber));
    } else {  // it may lie in the middle of its kernel
      munmap(fiber->stack, kStackBytes);
    }
  }
  machine() = nullptr;
  return m.failure;
}

inline std::string launch(int blocks, int threads, size_t shared_bytes, uint64_t seed, std::function<void()> kernel,
                          int block_y = 0) {
  return launch_together({{blocks, threads, shared_bytes, std::move(kernel), block_y}}, seed);
}

}  // namespace emulation
