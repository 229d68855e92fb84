// Which operands cuBLASLt's epilogues take, where they pay, and the products. Operands are bfloat16
// matrices of whole vectors of 16 bytes; all else goes the way of separate kernels.
#include "ligature/backend/cuda/activated_linear.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>

#include "ligature/backend/cuda/gemm_plan.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/kernels/devices.h"

namespace ligature::cuda {
namespace {

using kernels::ActivationKind;

enum class Fused : uint8_t {
  GeluForward,    ///< with what backward needs
  GeluInference,  ///< without
  WeightBias,
};

/// A fused GEMM pays where the matrix that the separate kernel would read has `from` values at
/// least, and fewer than `below`: as measured on an H200 at 2^23, 2^25 and 2^28 values. ReLU's
/// epilogues, and those of the gradients of GELU and ReLU, paid at no size that matters.
struct Pays {
  Fused product;
  int64_t from, below;
};

constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();
constexpr Pays kTable[] = {
    {Fused::GeluForward, int64_t{1} << 24, kAnySize},
    {Fused::GeluInference, 0, kAnySize},
    {Fused::WeightBias, 0, int64_t{10'000'000}},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kTable); ++i) {
    if (kTable[i].product != static_cast<Fused>(i)) return false;
  }
  return true;
}
static_assert(in_order());

std::atomic<EpilogueUse>& epilogue_use() {
  static std::atomic<EpilogueUse> use = [] {
    const char* text = std::getenv("LIGATURE_GEMM_EPILOGUES");
    if (text != nullptr && std::strcmp(text, "always") == 0) return EpilogueUse::Always;
    if (text != nullptr && std::strcmp(text, "never") == 0) return EpilogueUse::Never;
    return EpilogueUse::WhereTheyPay;
  }();
  return use;
}

const Pays& row_of(Fused product) { return kTable[static_cast<size_t>(product)]; }

bool pays(Fused product, int64_t values) {
  switch (epilogue_use().load(std::memory_order_relaxed)) {
    case EpilogueUse::Always:
      return true;
    case EpilogueUse::Never:
      return false;
    default:
      return values >= row_of(product).from && values < row_of(product).below;
  }
}

/// At some size?
bool ever_pays(Fused product) { return pays(product, row_of(product).from); }

bool is_gelu(const ActivationSpec& spec) { return spec.kind == ActivationKind::GELU; }

Fused forward_of(bool need_z) { return need_z ? Fused::GeluForward : Fused::GeluInference; }

bool is_here(const Tensor& t) {
  return t.is_cuda() || (t.is_meta() && kernels::device_behind(t) == at::kCUDA);
}

/// Also a tensor without memory that stands for one here: what a plan would run is asked with it.
bool readable(const Tensor& t, at::ScalarType dtype = at::kBFloat16) {
  return is_here(t) && t.scalar_type() == dtype && t.dim() > 0 && t.is_contiguous() &&
         !t.is_neg() && t.numel() > 0 &&
         (t.is_meta() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0);
}

bool is_matrix(const Tensor& t) { return readable(t) && t.size(-1) % 8 == 0; }

int64_t rows_of(const Tensor& t) { return t.numel() / t.size(-1); }

// Stands for memory that is not there yet, as the allocator will give it.
void* to_come() { return reinterpret_cast<void*>(uintptr_t{256}); }

const void* read(const Tensor& t) { return t.is_meta() ? nullptr : t.const_data_ptr(); }

/// d = a b, of contiguous matrices; `turned` ones are the transposes of those in memory.
Gemm product_of(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed) {
  Gemm gemm;
  const int64_t a_columns = a.size(-1), b_columns = b.size(-1);
  gemm.m = a_transposed ? a_columns : rows_of(a);
  gemm.k = a_transposed ? rows_of(a) : a_columns;
  gemm.n = b_transposed ? rows_of(b) : b_columns;
  gemm.type = gemm.bias_type = GemmType::BFloat16;
  gemm.a = {read(a), a_columns, a_transposed, GemmType::BFloat16, ScaleMode::None, nullptr};
  gemm.b = {read(b), b_columns, b_transposed, GemmType::BFloat16, ScaleMode::None, nullptr};
  gemm.ldd = gemm.n;
  return gemm;
}

// Results are described as memory that is to come.

Gemm forward_product(const Tensor& x, const Tensor& w, const Tensor& bias, bool need_z) {
  Gemm gemm = product_of(x, false, w, true);
  gemm.epilogue = Epilogue::Gelu;
  if (bias.defined()) {
    gemm.bias = bias.is_meta() ? to_come() : const_cast<void*>(bias.const_data_ptr());
  }
  if (need_z) {
    gemm.aux = to_come();
    gemm.ld_aux = gemm.n;
  }
  return gemm;
}

Gemm weight_product(const Tensor& dy, const Tensor& x) {
  Gemm gemm = product_of(dy, true, x, false);
  gemm.epilogue = Epilogue::BiasGradient;
  gemm.bias = to_come();
  return gemm;
}

bool exists(const Gemm& gemm, const Tensor& x) {
  const at::Device device = place_of(x);
  const DeviceGuard guard(device);
  return gemm_available(gemm, device.index());
}

bool fits_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                  const ActivationSpec& spec) {
  return is_gelu(spec) && is_matrix(x) && is_matrix(w) && x.device() == w.device() &&
         w.dim() == 2 && w.size(0) % 8 == 0 && x.size(-1) == w.size(1) &&
         (!bias.defined() || (readable(bias) && bias.dim() == 1 && bias.size(0) == w.size(0) &&
                              bias.device() == x.device()));
}

bool fits_weight(const Tensor& dy, const Tensor& x) {
  return is_matrix(dy) && is_matrix(x) && dy.device() == x.device() && rows_of(dy) == rows_of(x);
}

}  // namespace

void set_epilogue_use(EpilogueUse use) { epilogue_use() = use; }

bool has_activated_linear(const ActivationSpec& spec, at::ScalarType dtype) {
  return is_gelu(spec) && dtype == at::kBFloat16 &&
         (ever_pays(Fused::GeluForward) || ever_pays(Fused::GeluInference));
}

bool has_weight_bias_grad(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && ever_pays(Fused::WeightBias);
}

bool takes_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                             const ActivationSpec& spec, bool need_z) {
  return fits_forward(x, w, bias, spec) && exists(forward_product(x, w, bias, need_z), x);
}

bool takes_weight_bias_grad(const Tensor& dy, const Tensor& x) {
  return fits_weight(dy, x) && exists(weight_product(dy, x), dy);
}

bool runs_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                            const ActivationSpec& spec, bool need_z) {
  return fits_forward(x, w, bias, spec) && pays(forward_of(need_z), rows_of(x) * w.size(0)) &&
         takes_activated_forward(x, w, bias, spec, need_z);
}

bool runs_weight_bias_grad(const Tensor& dy, const Tensor& x) {
  return fits_weight(dy, x) && pays(Fused::WeightBias, dy.numel()) && takes_weight_bias_grad(dy, x);
}

ActivatedForward linear_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                          const ActivationSpec& spec, bool need_z) {
  LIGATURE_CHECK(fits_forward(x, w, bias, spec),
                 "[linear_activated_forward] operands must be bfloat16 matrices of whole vectors, ",
                 "got ", x.scalar_type(), " of shape ", x.sizes(), " and ", w.scalar_type(),
                 " of shape ", w.sizes());
  const DeviceGuard guard(x.device());
  ActivatedForward result{empty_rows(x, w.size(0)), {}};
  Gemm gemm = forward_product(x, w, bias, need_z);
  gemm.d = result.y.mutable_data_ptr();
  if (need_z) {
    result.z = empty_as(result.y);
    gemm.aux = result.z.mutable_data_ptr();
  }
  launch<&run_gemm>("gemm", stream_of(x), gemm, static_cast<int>(x.get_device()));
  return result;
}

WeightBiasGrads linear_weight_bias_grad(const Tensor& dy, const Tensor& x) {
  LIGATURE_CHECK(fits_weight(dy, x),
                 "[linear_weight_bias_grad] operands must be bfloat16 matrices of whole vectors, ",
                 "got ", dy.scalar_type(), " of shape ", dy.sizes(), " and ", x.scalar_type(),
                 " of shape ", x.sizes());
  const DeviceGuard guard(dy.device());
  Gemm gemm = weight_product(dy, x);
  WeightBiasGrads result{empty_on({gemm.m, gemm.n}, dy.scalar_type(), dy.device()),
                         empty_on({gemm.m}, dy.scalar_type(), dy.device())};
  gemm.d = result.dw.mutable_data_ptr();
  gemm.bias = result.dbias.mutable_data_ptr();
  launch<&run_gemm>("gemm", stream_of(dy), gemm, static_cast<int>(dy.get_device()));
  return result;
}

}  // namespace ligature::cuda
