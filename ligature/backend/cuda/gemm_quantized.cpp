// Products of quantized operands where the device has them. Both operands lie with k along their
// rows. Sizes that cuBLASLt does not take are filled up with zeros where that costs no copy of the
// result: k to a multiple of 16, the rows of `a` to one of 4 for factors by block.
#include <ATen/ops/constant_pad_nd.h>

#include <array>

#include "ligature/backend/cuda/gemm_launch.h"
#include "ligature/backend/cuda/gemm_tensor.h"
#include "ligature/backend/cuda/launch.h"

namespace ligature::cuda {
namespace {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool is_aligned(const Tensor& t, uintptr_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
}

GemmType element_type(Element element) {
  return element == Element::E4M3   ? GemmType::E4M3
         : element == Element::E5M2 ? GemmType::E5M2
                                    : GemmType::E2M1;
}

ScaleMode scale_mode(const Format& format) {
  switch (format.scaling) {
    case Scaling::Block:
      return format.block_2d ? ScaleMode::Block128 : ScaleMode::Vector128;
    case Scaling::MX:
      return ScaleMode::Vector32;
    case Scaling::NV:
      return ScaleMode::Vector16;
    default:
      return ScaleMode::Tensor;
  }
}

/// Sizes as cuBLASLt sees them.
struct Sizes {
  int64_t m, n, k;
};

Sizes filled_sizes(const QuantizedOperand& a, const QuantizedOperand& b) {
  return {a.format.scaling == Scaling::Block ? round_up(a.rows, 4) : a.rows, b.rows,
          round_up(a.k, 16)};
}

/// Stands for factors in memory, which a look at what is available never reads.
const void* const kSomeFactors = reinterpret_cast<const void*>(uintptr_t{4096});

/// Without memory: what the operands are, and a fresh result.
Gemm outline(const QuantizedOperand& a, const QuantizedOperand& b, const ProductTerms& terms) {
  const Sizes sizes = filled_sizes(a, b);
  Gemm gemm;
  gemm.m = sizes.m;
  gemm.n = sizes.n;
  gemm.k = sizes.k;
  gemm.a = {nullptr,     sizes.k, false, element_type(a.format.element), scale_mode(a.format),
            kSomeFactors};
  gemm.b = {nullptr,     sizes.k, true, element_type(b.format.element), scale_mode(b.format),
            kSomeFactors};
  gemm.type = gemm_type(terms.dtype);
  gemm.ldd = sizes.n;
  gemm.fast_accumulation = terms.fast_accumulation && a.format.per_tensor();
  return gemm;
}

/// Do the rules of the formats allow it?
QuantizedSupport by_format(const QuantizedOperand& a, const QuantizedOperand& b,
                           at::Device device) {
  const Format &f = a.format, &g = b.format;
  if (f.element == Element::E5M2 && g.element == Element::E5M2) return QuantizedSupport::No;
  if (!has_products_of(f, device) || !has_products_of(g, device)) return QuantizedSupport::No;
  if (f.per_tensor() && g.per_tensor()) return QuantizedSupport::Yes;
  if (f.scaling != g.scaling) return QuantizedSupport::No;
  if (f.scaling == Scaling::Block) {
    return f.block_2d && g.block_2d ? QuantizedSupport::No : QuantizedSupport::Yes;
  }
  return a.k % 32 == 0 ? QuantizedSupport::NeverRun : QuantizedSupport::No;
}

/// One operand's memory, and the layout of its factors that is still to be made.
class Prepared {
 public:
  Prepared(const QuantizedOperand& q, int64_t rows, int64_t k, GemmOperand& operand) {
    data_ = q.matrix.data;
    if (rows != q.rows || k != q.k) {
      data_ = at::constant_pad_nd(data_, {0, k - q.k, 0, rows - q.rows}, 0);
    }
    operand.data = data_.const_data_ptr();
    arrange(q, rows);
    operand.scale = scale_.const_data_ptr();
  }

  bool has_job() const { return job_.in != nullptr; }
  const ScaleJob& job() const { return job_; }

 private:
  void arrange(const QuantizedOperand& q, int64_t rows) {
    scale_ = q.matrix.scale;
    if (q.format.per_tensor()) return;
    const Tensor& given = q.matrix.scale;
    const int64_t columns = given.size(1);
    job_.rows = given.size(0);
    job_.columns = columns;
    bool as_it_is = false;
    if (q.format.scaling != Scaling::Block) {
      job_.layout = ScaleLayout::Tiled;
      job_.per_block = q.format.block_2d ? q.format.block_size() : 1;
    } else if (q.format.block_2d) {
      job_.layout = ScaleLayout::Filled;
      job_.ld = round_up(columns, 4);
      as_it_is = job_.ld == columns && given.is_contiguous();
    } else {
      job_.layout = ScaleLayout::Turned;
      job_.ld = rows;
      const bool turned = given.stride(0) == 1 && given.stride(1) == rows;
      as_it_is = rows == q.rows && (turned || (columns == 1 && given.stride(0) == 1));
    }
    if (as_it_is && is_aligned(given)) return;
    plain_ = given.contiguous();
    scale_ = small_on({size_of(job_)}, given.scalar_type(), given.device());
    job_.in = plain_.const_data_ptr();
    job_.out = scale_.mutable_data_ptr();
  }

  Tensor data_, scale_, plain_;
  ScaleJob job_;
};

void launch_jobs(const std::array<ScaleJob, 2>& jobs, int count, Stream stream) {
  launch_scales(jobs.data(), count, stream);
}

/// Queues it, with memory for d and c given and everything else from here.
void multiply(Gemm& gemm, const QuantizedOperand& a, const QuantizedOperand& b,
              const ProductTerms& terms, float beta, const Tensor& d) {
  const Stream stream = stream_of(d);
  const Prepared left(a, gemm.m, gemm.k, gemm.a), right(b, gemm.n, gemm.k, gemm.b);
  std::array<ScaleJob, 2> jobs;
  int count = 0;
  for (const Prepared* side : {&left, &right}) {
    if (side->has_job()) jobs[static_cast<size_t>(count++)] = side->job();
  }
  if (count > 0) {
    launch<&launch_jobs>("gemm scales", stream, jobs, count);
  }
  const Tensor held = set_coefficients(gemm, terms, beta, stream);
  launch<&run_gemm>("gemm", stream, gemm, static_cast<int>(d.get_device()));
}

}  // namespace

bool has_products_of(const Format& format, at::Device device) {
  if (!device.is_cuda()) return false;
  const auto* properties = at::cuda::getDeviceProperties(
      device.has_index() ? device.index() : c10::cuda::current_device());
  if (format.per_tensor()) return properties->major * 10 + properties->minor >= 89;
  if (format.scaling == Scaling::Block) return properties->major == 9;
  return properties->major == 10 && !format.row_scaled;
}

QuantizedSupport quantized_support(const QuantizedOperand& a, const QuantizedOperand& b,
                                   at::ScalarType dtype) {
  if (a.rows == 0 || b.rows == 0 || a.k == 0 || a.k != b.k || b.rows % 16 != 0 ||
      !computes_in(dtype)) {
    return QuantizedSupport::No;
  }
  for (const QuantizedOperand* q : {&a, &b}) {
    const Tensor& data = q->matrix.data;
    if (!data.is_contiguous() || (!data.is_meta() && !is_aligned(data))) {
      return QuantizedSupport::No;
    }
  }
  const at::Device device = place_of(a.matrix.data);
  const QuantizedSupport support = by_format(a, b, device);
  if (support == QuantizedSupport::No) return support;
  const DeviceGuard guard(device);
  ProductTerms terms;
  terms.dtype = dtype;
  return gemm_available(outline(a, b, terms), device.index()) ? support : QuantizedSupport::No;
}

Tensor quantized_product(const QuantizedOperand& a, const QuantizedOperand& b,
                         const ProductTerms& terms) {
  const at::Device device = a.matrix.data.device();
  const DeviceGuard guard(device);
  Gemm gemm = outline(a, b, terms);
  Tensor whole = empty_on({gemm.m, gemm.n}, terms.dtype, device);
  Tensor y = gemm.m == a.rows ? whole : whole.narrow(0, 0, a.rows);
  gemm.d = whole.mutable_data_ptr();
  Tensor add;
  if (terms.add.defined()) {
    add = as_dtype(terms.add, terms.dtype);
    auto matrix = rows_in_place(add);
    if (!matrix || y.size(0) != gemm.m || !is_aligned(add) ||
        matrix->ld * add.element_size() % 16 != 0) {
      y.copy_(add);
      matrix = rows_in_place(whole);
    }
    gemm.c = matrix->data;
    gemm.ldc = matrix->ld;
  }
  // With a float32 result cuBLASLt takes a bfloat16 bias alone.
  const bool bias_inside = terms.bias.defined() && terms.dtype != at::kFloat;
  Tensor bias;
  if (bias_inside) {
    bias = as_dtype(terms.bias, terms.dtype).contiguous();
    gemm.bias = const_cast<void*>(bias.const_data_ptr());
    gemm.bias_type = gemm_type(terms.dtype);
  }
  multiply(gemm, a, b, terms, add.defined() ? 1.0F : 0.0F, whole);
  if (terms.bias.defined() && !bias_inside) y.add_(terms.bias);
  return y;
}

void quantized_product_into(Tensor& out, const QuantizedOperand& a, const QuantizedOperand& b,
                            bool accumulate, const ProductTerms& terms) {
  const DeviceGuard guard(out.device());
  ProductTerms own = terms;
  own.dtype = out.scalar_type();
  own.bias = own.add = Tensor();
  const auto matrix = rows_in_place(out);
  const bool fits = matrix && runs(out) && is_aligned(out) &&
                    matrix->ld * out.element_size() % 16 == 0 && filled_sizes(a, b).m == a.rows;
  if (!fits) {
    own.dtype = at::kFloat;
    const Tensor wide = quantized_product(a, b, own);
    accumulate ? out.add_(wide) : out.copy_(wide);
    return;
  }
  Gemm gemm = outline(a, b, own);
  gemm.d = out.mutable_data_ptr();
  gemm.ldd = matrix->ld;
  if (accumulate) {
    gemm.c = gemm.d;
    gemm.ldc = gemm.ldd;
  }
  multiply(gemm, a, b, own, accumulate ? 1.0F : 0.0F, out);
}

}  // namespace ligature::cuda
