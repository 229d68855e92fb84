// Verifies a basic operation: it computes what a formula says, in either direction.
#pragma once

#include <functional>
#include <vector>

#include "ligature/testing/options.h"
#include "ligature/testing/report.h"
#include "ligature/testing/subject.h"

namespace ligature::testing {

/// The output and the extra outputs as a formula of tensors in float64, which autograd
/// differentiates.
using Reference = std::function<std::vector<Tensor>(
    const Tensor& input, const std::vector<Tensor>& params, const std::vector<Tensor>& extras)>;

/// Compares an operation with a formula over dtypes, shapes, and choices of what needs gradients,
/// and its backward with differences of its forward in float64. An output may share memory with an
/// input where the formula's does. Finds the same mistakes as check_fusion, and a compute half that
/// returns an argument to be saved. Example:
/// ```
/// Report report = check_operation(
///     [](at::ScalarType, at::Device) -> OpList { return {SiLU().ptr()}; },
///     [](const Tensor& x, const auto&, const auto&) -> std::vector<Tensor> {
///       return {x * x.sigmoid()};
///     },
///     {{{2, 3, 8}}, {{5, 8}}});
/// EXPECT_TRUE(report) << report.text();
/// ```
Report check_operation(const MakeSubject& make, const Reference& reference,
                       const std::vector<ExampleShapes>& shapes, CheckOptions options = {});
Report check_operation(const MakeOps& make, const Reference& reference,
                       const std::vector<ExampleShapes>& shapes, CheckOptions options = {});

}  // namespace ligature::testing
