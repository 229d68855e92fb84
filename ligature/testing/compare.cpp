#include "ligature/testing/compare.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "ligature/meta.h"
#include "ligature/testing/subject.h"

namespace ligature::testing {

double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-9;
    case at::kFloat:
      return 1e-5;
    case at::kHalf:
      return 4e-3;
    case at::kBFloat16:
      return 3e-2;
    default:
      return 0;
  }
}

double rounding_of(Element element) {
  switch (element) {
    case Element::E4M3:
      return 0x1p-4;
    case Element::E5M2:
      return 0x1p-3;
    case Element::E2M1:
      return 0x1p-2;
  }
  return 0;
}

namespace {

/// Values are of order one; a result much smaller is a difference of such.
constexpr double kSmallest = 0.1;

std::string place(const Tensor& t, int64_t flat) {
  std::vector<int64_t> index(t.dim());
  for (int64_t d = t.dim(); d-- > 0;) {
    index[d] = flat % t.size(d);
    flat /= t.size(d);
  }
  return sizes_string(index);
}

std::string number(double value) {
  std::ostringstream out;
  out.precision(3);
  out << value;
  return out.str();
}

}  // namespace

std::string difference(const Tensor& actual, const Tensor& expected, double tolerance,
                       const Tensor& spread) {
  if (actual.sizes() != expected.sizes()) {
    return "has shape " + sizes_string(actual.sizes()) + ", wanted " +
           sizes_string(expected.sizes());
  }
  const int64_t n = actual.numel();
  if (n == 0 || same_bits(actual, expected)) return "";
  // Plain loops: the tensors of a check are small, and there are many of them.
  const auto values = [](const Tensor& t) {
    return t.defined() ? t.detach().to(at::kCPU, at::kDouble).contiguous() : Tensor();
  };
  const Tensor actual_values = values(actual), expected_values = values(expected);
  const Tensor spread_values = values(spread);
  const double* a = actual_values.const_data_ptr<double>();
  const double* e = expected_values.const_data_ptr<double>();
  const double* more = spread.defined() ? spread_values.const_data_ptr<double>() : nullptr;
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += std::isfinite(e[i]) ? e[i] * e[i] : 0;
  const double typical = std::max(std::sqrt(squares / static_cast<double>(n)), kSmallest);

  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double worst = -1, worst_off = 0, worst_allowed = 0;
  int64_t at = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (a[i] == e[i] || (std::isnan(a[i]) && std::isnan(e[i]))) continue;
    const bool finite = std::isfinite(a[i]) && std::isfinite(e[i]);
    const double off = finite ? std::abs(a[i] - e[i]) : kInfinity;
    const double allowed =
        finite ? tolerance * (std::abs(e[i]) + typical) + (more != nullptr ? more[i] : 0) : 0;
    const double ratio = allowed > 0 ? off / allowed : kInfinity;
    if (ratio <= 1 || ratio <= worst) continue;
    worst = ratio;
    worst_off = off;
    worst_allowed = allowed;
    at = i;
  }
  if (at < 0) return "";
  const std::string where = expected.dim() == 0 ? "" : " at " + place(expected, at);
  if (!std::isfinite(worst_off)) {
    return "is " + number(a[at]) + ", wanted " + number(e[at]) + where;
  }
  return "is off by " + number(worst_off) + " (allowed " + number(worst_allowed) + ")" + where;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.defined() == b.defined() &&
         (!a.defined() || (a.scalar_type() == b.scalar_type() && at::equal(a, b)));
}

bool share_memory(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || b.numel() == 0) return false;
  return a.is_same(b) || (a.has_storage() && b.has_storage() && a.is_alias_of(b));
}

Tensor copy_of(const Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t.detach());
}

}  // namespace ligature::testing
