// A plan is what cuBLASLt wants described before each product, and the algorithm it chose. Each
// thread keeps its own plans: look-ups need no lock, and pointers may be written into a plan's
// descriptor. The algorithm is expensive to find, so threads share it.
#include "ligature/backend/cuda/gemm_plan.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "ligature/backend/cuda/launch_queue.h"
#include "ligature/backend/cuda/workspace.h"
#include "ligature/check.h"

namespace ligature::cuda {
namespace {

constexpr size_t kMaxPlans = 4096;
constexpr int kCandidates = 8;
constexpr int kMaxDevices = 64;

void check(cublasStatus_t status, const char* what) {
  LIGATURE_CHECK_STATE(status == CUBLAS_STATUS_SUCCESS, "[gemm] ", what,
                       " failed: ", cublasLtGetStatusString(status));
}

cudaDataType_t data_type(GemmType type) {
  switch (type) {
    case GemmType::Float16:
      return CUDA_R_16F;
    case GemmType::BFloat16:
      return CUDA_R_16BF;
    case GemmType::E4M3:
      return CUDA_R_8F_E4M3;
    case GemmType::E5M2:
      return CUDA_R_8F_E5M2;
    case GemmType::E2M1:
      return CUDA_R_4F_E2M1;
    default:
      return CUDA_R_32F;
  }
}

int64_t bytes_of(GemmType type) { return type == GemmType::Float32 ? 4 : 2; }

int32_t scale_mode(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::Vector128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::Block128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleMode::Vector32:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::Vector16:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

uint32_t epilogue_of(const Gemm& gemm) {
  const uint32_t bias = gemm.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : 0;
  switch (gemm.epilogue) {
    case Epilogue::Gelu:
      return bias | (gemm.aux != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU);
    case Epilogue::BiasGradient:
      return CUBLASLT_EPILOGUE_BGRADB;
    default:
      return bias != 0 ? bias : static_cast<uint32_t>(CUBLASLT_EPILOGUE_DEFAULT);
  }
}

// As a power of two, 256 bytes at most.
uint64_t alignment_bits(const void* p) {
  return std::min(8, std::countr_zero(reinterpret_cast<uintptr_t>(p)));
}

/// Everything that a plan depends on.
struct Key {
  std::array<uint64_t, 9> words;

  Key(const Gemm& g, int device)
      : words{static_cast<uint64_t>(g.m),
              static_cast<uint64_t>(g.n),
              static_cast<uint64_t>(g.k),
              static_cast<uint64_t>(g.a.ld),
              static_cast<uint64_t>(g.b.ld),
              static_cast<uint64_t>(g.ldc),
              static_cast<uint64_t>(g.ldd),
              static_cast<uint64_t>(g.ld_aux),
              0} {
    int at = 0;
    const auto put = [&](uint64_t value, int bits) {
      words[8] |= value << at;
      at += bits;
    };
    for (const GemmType type : {g.a.type, g.b.type, g.type, g.bias_type}) {
      put(static_cast<uint64_t>(type), 3);
    }
    for (const ScaleMode mode : {g.a.scale_mode, g.b.scale_mode}) {
      put(static_cast<uint64_t>(mode), 3);
    }
    put(static_cast<uint64_t>(g.epilogue), 3);
    for (const bool flag :
         {g.a.transposed, g.b.transposed, g.bias != nullptr, g.aux != nullptr, g.c != nullptr,
          g.coefficients != nullptr, g.tf32, g.fast_accumulation}) {
      put(flag ? 1 : 0, 1);
    }
    put(static_cast<uint64_t>(device), 6);
    for (const void* p : {g.a.data, g.b.data, g.c, static_cast<const void*>(g.d),
                          static_cast<const void*>(g.bias), static_cast<const void*>(g.aux)}) {
      put(alignment_bits(p), 4);
    }
  }

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0;
    for (const uint64_t word : key.words) {
      h = (h ^ word) * 0x9e3779b97f4a7c15ULL;
      h ^= h >> 32;
    }
    return h;
  }
};

struct Choice {
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace = 0;
  bool available = false;
  bool searched = false;
};

struct Plan {
  cublasLtMatmulDescOpaque_t op{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, c{}, d{};
  Choice choice;
  // What the descriptor points to.
  const void* bias = nullptr;
  const void* aux = nullptr;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check(cublasLtMatmulDescSetAttribute(&op, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }

  void point(cublasLtMatmulDescAttributes_t attribute, const void*& now, const void* wanted) {
    if (now == wanted) return;
    set(attribute, wanted);
    now = wanted;
  }

  void point(const Gemm& gemm) {
    point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, gemm.bias);
    point(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux, gemm.aux);
    // Row-major products are the column-major ones of the transposes: a and b change places.
    point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a_scale, gemm.b.scale);
    point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b_scale, gemm.a.scale);
  }
};

void init_layout(cublasLtMatrixLayoutOpaque_t& layout, GemmType type, int64_t rows, int64_t columns,
                 int64_t ld) {
  check(cublasLtMatrixLayoutInit(&layout, data_type(type), static_cast<uint64_t>(rows),
                                 static_cast<uint64_t>(columns), ld),
        "cublasLtMatrixLayoutInit");
}

void describe(Plan& plan, const Gemm& g) {
  const bool tf32 = g.tf32 && g.a.type == GemmType::Float32;
  check(cublasLtMatmulDescInit(&plan.op, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                               CUDA_R_32F),
        "cublasLtMatmulDescInit");
  const auto operation = [](bool turned) -> int32_t { return turned ? CUBLAS_OP_T : CUBLAS_OP_N; };
  plan.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(g.b.transposed));
  plan.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(g.a.transposed));
  plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(g));
  if (g.bias != nullptr) {
    plan.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(g.bias_type)));
  }
  if (g.aux != nullptr) plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.ld_aux);
  if (g.coefficients != nullptr) {
    plan.set(CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
  }
  if (g.fast_accumulation) plan.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(1));
  if (g.a.scale_mode != ScaleMode::None) {
    plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(g.b.scale_mode));
    plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(g.a.scale_mode));
  }
  plan.point(g);
  g.b.transposed ? init_layout(plan.a, g.b.type, g.k, g.n, g.b.ld)
                 : init_layout(plan.a, g.b.type, g.n, g.k, g.b.ld);
  g.a.transposed ? init_layout(plan.b, g.a.type, g.m, g.k, g.a.ld)
                 : init_layout(plan.b, g.a.type, g.k, g.m, g.a.ld);
  init_layout(plan.c, g.type, g.n, g.m, g.c != nullptr ? g.ldc : g.ldd);
  init_layout(plan.d, g.type, g.n, g.m, g.ldd);
}

cublasLtHandle_t handle_of(int device) {
  static std::array<std::atomic<cublasLtHandle_t>, kMaxDevices> handles{};
  static std::mutex mutex;
  LIGATURE_CHECK(device >= 0 && device < kMaxDevices, "[gemm] device must be below ", kMaxDevices,
                 ", got ", device);
  auto& slot = handles[static_cast<size_t>(device)];
  cublasLtHandle_t handle = slot.load(std::memory_order_acquire);
  if (handle != nullptr) return handle;
  const std::lock_guard<std::mutex> lock(mutex);
  handle = slot.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    check(cublasLtCreate(&handle), "cublasLtCreate");
    slot.store(handle, std::memory_order_release);
  }
  return handle;
}

/// The best algorithms, as cuBLASLt reckons. All sum up in float32, also over a split k.
int algorithms(Plan& plan, const Gemm& g, int device,
               std::array<cublasLtMatmulHeuristicResult_t, kCandidates>& found) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  const auto aligned = [](const void* p) { return uint32_t{1} << alignment_bits(p); };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_limit(device)));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned(g.b.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned(g.a.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned(g.c != nullptr ? g.c : g.d));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned(g.d));
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_of(device), &plan.op, &plan.a, &plan.b, &plan.c,
                                     &plan.d, &preference, kCandidates, found.data(), &count);
  // Both mean that there is none: it depends on the version which one a product gets.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return 0;
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  const auto end = std::remove_if(found.begin(), found.begin() + count, [](const auto& result) {
    return result.state != CUBLAS_STATUS_SUCCESS;
  });
  return static_cast<int>(end - found.begin());
}

struct Choices {
  std::mutex mutex;
  std::unordered_map<Key, Choice, KeyHash> by_key;
};

Choices& choices() {
  static Choices* all = new Choices;  // outlives every thread
  return *all;
}

std::unordered_map<Key, Plan, KeyHash>& plans() {
  thread_local std::unordered_map<Key, Plan, KeyHash> of_thread;
  return of_thread;
}

Choice choose(Plan& plan, const Gemm& gemm, const Key& key, int device) {
  {
    const std::lock_guard<std::mutex> lock(choices().mutex);
    const auto known = choices().by_key.find(key);
    if (known != choices().by_key.end()) return known->second;
  }
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
  Choice choice;
  if (algorithms(plan, gemm, device, found) > 0) {
    choice = {found[0].algo, found[0].workspaceSize, true, false};
  }
  const std::lock_guard<std::mutex> lock(choices().mutex);
  if (choices().by_key.size() >= kMaxPlans) choices().by_key.clear();
  return choices().by_key.emplace(key, choice).first->second;
}

Plan& plan_for(const Gemm& gemm, const Key& key, int device) {
  auto& all = plans();
  if (const auto known = all.find(key); known != all.end()) return known->second;
  if (all.size() >= kMaxPlans) all.clear();
  const auto made = all.try_emplace(key).first;
  Plan& plan = made->second;
  try {
    describe(plan, gemm);
    plan.choice = choose(plan, gemm, key, device);
  } catch (...) {
    all.erase(made);
    throw;
  }
  return plan;
}

cublasStatus_t multiply(Plan& plan, const Choice& choice, const Gemm& g, int device, Stream stream,
                        void* memory) {
  const void* alpha = g.coefficients != nullptr ? g.coefficients : &g.alpha;
  const void* beta = g.coefficients != nullptr ? g.coefficients + 1 : &g.beta;
  return cublasLtMatmul(handle_of(device), &plan.op, alpha, g.b.data, &plan.a, g.a.data, &plan.b,
                        beta, g.c != nullptr ? g.c : g.d, &plan.c, g.d, &plan.d, &choice.algorithm,
                        memory, choice.workspace, stream);
}

struct Event {
  cudaEvent_t event = nullptr;
  Event() { C10_CUDA_CHECK(cudaEventCreate(&event)); }
  ~Event() { C10_CUDA_CHECK_WARN(cudaEventDestroy(event)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

float milliseconds(Plan& plan, const Choice& choice, const Gemm& gemm, int device, Stream stream,
                   void* memory) {
  constexpr int kRuns = 5;
  const Event begin, end;
  if (multiply(plan, choice, gemm, device, stream, memory) != CUBLAS_STATUS_SUCCESS) return -1.0F;
  C10_CUDA_CHECK(cudaEventRecord(begin.event, stream));
  for (int i = 0; i < kRuns; ++i) multiply(plan, choice, gemm, device, stream, memory);
  C10_CUDA_CHECK(cudaEventRecord(end.event, stream));
  C10_CUDA_CHECK(cudaEventSynchronize(end.event));
  float sum = 0.0F;
  C10_CUDA_CHECK(cudaEventElapsedTime(&sum, begin.event, end.event));
  return sum / kRuns;
}

/// Results go into memory of its own, so that what is to be added to stays as it is.
void search(Plan& plan, const Gemm& gemm, const Key& key, int device, Stream stream) {
  {
    const std::lock_guard<std::mutex> lock(choices().mutex);
    const auto known = choices().by_key.find(key);
    if (known != choices().by_key.end() && known->second.searched) {
      plan.choice = known->second;
      return;
    }
  }
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
  const int count = algorithms(plan, gemm, device, found);
  const at::TensorBase side = at::detail::empty_cuda(
      {((gemm.m - 1) * gemm.ldd + gemm.n) * bytes_of(gemm.type)}, at::kByte,
      at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)), std::nullopt);
  Gemm aside = gemm;
  aside.d = side.mutable_data_ptr();
  if (gemm.c == gemm.d) aside.c = aside.d;
  at::TensorBase keep;
  void* memory = workspace(device, stream, workspace_limit(device), false, keep);
  float best = -1.0F;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const Choice choice{found[i].algo, found[i].workspaceSize, true, true};
    const float time = milliseconds(plan, choice, aside, device, stream, memory);
    if (time < 0.0F || (best >= 0.0F && time >= best)) continue;
    best = time;
    plan.choice = choice;
  }
  plan.choice.searched = true;
  const std::lock_guard<std::mutex> lock(choices().mutex);
  choices().by_key[key] = plan.choice;
}

}  // namespace

bool gemm_search() {
  static const bool on = [] {
    const char* text = std::getenv("LIGATURE_GEMM_SEARCH");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return on;
}

bool gemm_available(const Gemm& gemm, int device) {
  return plan_for(gemm, Key(gemm, device), device).choice.available;
}

void run_gemm(const Gemm& gemm, int device, Stream stream) {
  const Key key(gemm, device);
  Plan& plan = plan_for(gemm, key, device);
  LIGATURE_CHECK_STATE(plan.choice.available, "[gemm] cuBLASLt has no algorithm for a product of [",
                       gemm.m, ", ", gemm.k, "] and [", gemm.k, ", ", gemm.n, "] on this device");
  plan.point(gemm);
  const bool to_search = !plan.choice.searched && gemm_search();
  const CaptureStreams& held = capture_streams();
  const bool of_held = held.capture == stream && stream != nullptr;
  const bool capturing =
      !of_held && (plan.choice.workspace > 0 || to_search) && is_capturing(stream);
  if (to_search && !capturing) search(plan, gemm, key, device, stream);
  at::TensorBase keep;
  void* memory =
      workspace(device, of_held ? held.real : stream, plan.choice.workspace, capturing, keep);
  check(multiply(plan, plan.choice, gemm, device, stream, memory), "cublasLtMatmul");
}

}  // namespace ligature::cuda
