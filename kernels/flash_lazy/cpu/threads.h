// Tasks on several threads: those of torch's own OpenMP pool, so that two pools do not compete for the cores.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

// Memory of a thread that is kept between calls: asking the system for megabytes again costs more than a small call.
class Scratch {
 public:
  // The given number of floats, aligned to a cache line, with undefined values.
  float* reserve(size_t size) {
    if (size > size_) {
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64)));
      size_ = memory_ ? size : 0;
      if (!memory_) std::abort();
    }
    return memory_.get();
  }
  void shrink() {
    if (size_ > KEPT) memory_.reset(), size_ = 0;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  static constexpr size_t KEPT = size_t(1) << 24;  // 64 MiB
  std::unique_ptr<float[], Free> memory_;
  size_t size_ = 0;
};

// Calls work(task, scratch) for every task below `tasks`. The order is open, so that a task must not read another's
// result; each task then has the same result on any number of threads.
template <class Work>
static void run_tasks(int64_t threads, int64_t tasks, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    static void run(void* p) {
      thread_local Scratch scratch;
      auto& shared = *static_cast<Shared*>(p);
      for (int64_t task; (task = shared.next++) < shared.tasks;) shared.work(task, scratch);
      scratch.shrink();
    }
  } shared{work, tasks};
  threads = std::min(threads, tasks);
  if (threads <= 1) return Shared::run(&shared);
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (parallel) return parallel(Shared::run, &shared, unsigned(threads), 0);
  std::vector<std::thread> others;  // where torch's OpenMP has another interface
  for (int64_t i = 1; i < threads; i++) others.emplace_back(Shared::run, &shared);
  Shared::run(&shared);
  for (auto& other : others) other.join();
}
