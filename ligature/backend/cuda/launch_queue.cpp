// Held launches find ATen calls by a key of torch's that its header keeps for tests. Its successor
// needs no key. The run knows where code that is not ours begins (kernels::Run::Outside: Python
// operations, hooks, whatever is no built-in operation), and our own operations call ATen in few
// places, each of which flushes first. The queue, the graph that is being made, its temporaries and
// an LRU of executables become one object of the run, as MLX's CommandEncoder is; an executable
// whose kernels are the same with other arguments has its parameters updated instead of being made
// anew. The present form was checked on a GPU, so it stays until that one can be.
#include "ligature/backend/cuda/launch_queue.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "ligature/backend/cuda/gemm_plan.h"
#include "ligature/backend/cuda/launch_scope.h"
#include "ligature/backend/cuda/workspace.h"

namespace ligature::cuda {
namespace {

// A key of torch's for tries of a mode, which has no use of its own: while launches are held, ATen
// calls come by here first.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Above this a direction's kernels run longer than it takes to launch them, and what they use is
// better given back early.
constexpr size_t kMaxInputBytes = size_t{8} << 20;
constexpr size_t kMinLaunches = 2;
constexpr int kSightings = 3;  // of the same launches, before a graph of them is made
constexpr size_t kMaxGraphs = 512;
constexpr size_t kMaxSeen = 8192;

void check(cudaError_t error, const char* what) {
  LIGATURE_CHECK_STATE(error == cudaSuccess, "[launch] ", what,
                       " failed: ", cudaGetErrorString(error));
}

struct Graph {
  std::vector<std::byte> bytes;
  Stream stream = nullptr;
  int device = 0;
  cudaGraphExec_t exec = nullptr;
  uint64_t used = 0;
};

struct Seen {
  int times = 0;
  std::unique_ptr<Graph> graph;
};

struct Graphs {
  std::mutex mutex;
  std::unordered_map<uint64_t, Seen> by_hash;
  size_t count = 0;
  uint64_t clock = 0;
  LaunchCounts told;
};

Graphs& graphs() {
  static Graphs* all = new Graphs;  // outlives every thread, and the driver
  return *all;
}

uint64_t hash_of(const std::vector<std::byte>& bytes, Stream stream, int device) {
  uint64_t h = reinterpret_cast<uintptr_t>(stream) * 0x9e3779b97f4a7c15ULL +
               static_cast<uint64_t>(device) + bytes.size();
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {  // a multiple of 16
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    h = (h ^ word) * 0x9e3779b97f4a7c15ULL;
    h ^= h >> 29;
  }
  return h;
}

thread_local CaptureStreams of_capture;

/// Records on a stream of its own for as long as it lives.
class Capture {
 public:
  Capture(int device, Stream real) {
    static std::array<std::atomic<cudaStream_t>, 64> streams{};
    auto& slot = streams.at(static_cast<size_t>(device));
    stream_ = slot.load();
    if (stream_ == nullptr) {  // under the mutex of graphs()
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
      slot.store(stream_);
    }
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    of_capture = {stream_, real};
  }
  ~Capture() {
    if (graph_ == nullptr) static_cast<void>(cudaStreamEndCapture(stream_, &graph_));
    of_capture = {};
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  Stream stream() const { return stream_; }
  cudaGraphExec_t end() {
    check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    cudaGraphExec_t exec = nullptr;
    check(cudaGraphInstantiate(&exec, graph_, 0), "cudaGraphInstantiate");
    return exec;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

std::atomic<bool>& graphs_flag() {
  static std::atomic<bool> on = [] {
    const char* text = std::getenv("LIGATURE_LAUNCH_GRAPHS");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  return on;
}

/// Under the mutex: the graph that was not used for the longest time makes room for another.
void drop_oldest(Graphs& all) {
  auto oldest = all.by_hash.end();
  for (auto it = all.by_hash.begin(); it != all.by_hash.end(); ++it) {
    if (it->second.graph == nullptr) continue;
    if (oldest == all.by_hash.end() || it->second.graph->used < oldest->second.graph->used) {
      oldest = it;
    }
  }
  if (oldest == all.by_hash.end()) return;
  static_cast<void>(cudaGraphExecDestroy(oldest->second.graph->exec));
  all.by_hash.erase(oldest);
  --all.count;
}

/// Gives its argument's memory under another name, or memory without content. What merely may do
/// so, as contiguous() or to(), is not among them.
bool computes_nothing(const std::string& name) {
  static const std::unordered_set<std::string_view> names = {
      "aten::alias",  "aten::as_strided",    "aten::detach",    "aten::empty",  "aten::empty_like",
      "aten::expand", "aten::empty_strided", "aten::new_empty", "aten::narrow", "aten::permute",
      "aten::select", "aten::slice",         "aten::squeeze",   "aten::t",      "aten::transpose",
      "aten::view",   "aten::unsqueeze",     "aten::view_as",
  };
  return names.contains(name);
}

void aten_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  LaunchQueue* queue = LaunchQueue::current();
  const c10::FunctionSchema& schema = op.schema();
  {
    const LaunchPause pause(/*launch=*/!computes_nothing(schema.name()));
    op.callBoxed(stack);
  }
  if (queue == nullptr) return;
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) queue->hold(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const Tensor& tensor : value.toTensorVector()) queue->hold(tensor);
  }
}

}  // namespace

thread_local LaunchQueue* LaunchQueue::current_ = nullptr;

const CaptureStreams& capture_streams() { return of_capture; }

void check_launch(const char* name) {
  const cudaError_t error = cudaPeekAtLastError();
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it is told once
  LIGATURE_CHECK_STATE(false, "[", name, "] launch failed: ", cudaGetErrorString(error));
}

void* LaunchQueue::place(size_t size, Run function, const char* name) {
  const size_t head = (sizeof(Run) + kAlignment - 1) / kAlignment * kAlignment;
  const size_t begin = bytes_.size();
  bytes_.resize(begin + head + (size + kAlignment - 1) / kAlignment * kAlignment);
  std::memcpy(bytes_.data() + begin, &function, sizeof(Run));
  items_.push_back({function, name, begin + head});
  return bytes_.data() + begin + head;
}

std::shared_ptr<const std::atomic<bool>> LaunchQueue::when_launched() {
  if (items_.empty()) return nullptr;
  if (launched_ == nullptr) launched_ = std::make_shared<std::atomic<bool>>(false);
  return launched_;
}

void LaunchQueue::change_stream(Stream stream) {
  flush();
  stream_ = stream;
}

void LaunchQueue::launch_all(Stream stream) const {
  for (const Item& item : items_) item.run(bytes_.data() + item.offset, item.name, stream);
}

bool LaunchQueue::replay() {
  if (items_.size() < kMinLaunches) return false;
  const uint64_t hash = hash_of(bytes_, stream_, device_);
  Graphs& all = graphs();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_hash.find(hash);
  if (found == all.by_hash.end()) {
    if (all.by_hash.size() >= kMaxSeen) {
      std::erase_if(all.by_hash, [](const auto& item) { return item.second.graph == nullptr; });
    }
    found = all.by_hash.try_emplace(hash).first;
  }
  Seen& seen = found->second;
  if (seen.graph == nullptr) {
    if (++seen.times < kSightings) return false;
    auto graph = std::make_unique<Graph>();
    {
      const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
      Capture capture(device_, stream_);
      launch_all(capture.stream());
      graph->exec = capture.end();
    }
    graph->bytes = bytes_;
    graph->stream = stream_;
    graph->device = device_;
    graph->used = ++all.clock;
    seen.graph = std::move(graph);
    ++all.told.graphs;
    if (++all.count > kMaxGraphs) drop_oldest(all);
  } else if (seen.graph->stream != stream_ || seen.graph->device != device_ ||
             seen.graph->bytes != bytes_) {
    return false;
  }
  seen.graph->used = ++all.clock;
  check(cudaGraphLaunch(seen.graph->exec, stream_), "cudaGraphLaunch");
  ++all.told.replayed;
  return true;
}

void LaunchQueue::flush() {
  // Whatever happens, nothing is launched twice, and nothing is held for ever.
  struct Clear {
    LaunchQueue& queue;
    ~Clear() {
      queue.items_.clear();
      queue.bytes_.clear();
      queue.memory_.clear();
      if (queue.launched_ != nullptr) queue.launched_->store(true, std::memory_order_release);
      queue.launched_ = nullptr;
    }
  } clear{*this};
  if (items_.empty()) return;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
  if (replay()) return;
  launch_all(stream_);
  const std::lock_guard<std::mutex> lock(graphs().mutex);
  graphs().told.single += static_cast<int64_t>(items_.size());
}

LaunchScope::LaunchScope(const Tensor& input) {
  if (LaunchQueue::current_ != nullptr || !input.defined() || !input.is_cuda() ||
      input.nbytes() > kMaxInputBytes || !launch_graphs() || gemm_search()) {
    return;
  }
  const Stream stream = c10::cuda::getCurrentCUDAStream(input.device().index()).stream();
  if (is_capturing(stream)) return;
  thread_local LaunchQueue of_thread;
  of_thread.stream_ = stream;
  of_thread.device_ = input.device().index();
  LaunchQueue::current_ = &of_thread;
  // A compiler's first call comes with every such key shut out.
  excluded_ = c10::impl::tls_is_dispatch_key_excluded(kKey);
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  open_ = true;
}

void LaunchScope::finish() {
  if (!open_) return;
  open_ = false;
  LaunchQueue* queue = LaunchQueue::current_;
  LaunchQueue::current_ = nullptr;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  c10::impl::tls_set_dispatch_key_excluded(kKey, excluded_);
  queue->flush();
}

LaunchScope::~LaunchScope() {
  try {
    finish();  // something was thrown: what came before it is launched, as it would have been
  } catch (...) {
  }
}

LaunchPause::LaunchPause(bool launch) {
  LaunchQueue* queue = LaunchQueue::current_;
  if (queue == nullptr) return;
  if (launch) queue->flush();
  LaunchQueue::current_ = nullptr;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  paused_ = queue;
}

LaunchPause::~LaunchPause() {
  if (paused_ == nullptr) return;
  LaunchQueue::current_ = static_cast<LaunchQueue*>(paused_);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

bool holds_launches() { return LaunchQueue::current() != nullptr; }

std::shared_ptr<const std::atomic<bool>> when_launched() {
  LaunchQueue* queue = LaunchQueue::current();
  return queue != nullptr ? queue->when_launched() : nullptr;
}

void hold_memory(const Tensor& tensor) {
  if (LaunchQueue* queue = LaunchQueue::current(); queue != nullptr && tensor.defined()) {
    queue->hold(tensor);
  }
}

void set_launch_graphs(bool on) { graphs_flag() = on; }
bool launch_graphs() { return graphs_flag().load(std::memory_order_relaxed); }

LaunchCounts launch_counts() {
  const std::lock_guard<std::mutex> lock(graphs().mutex);
  return graphs().told;
}

}  // namespace ligature::cuda

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&ligature::cuda::aten_call>());
}
