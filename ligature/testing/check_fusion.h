// Verifies a fusion: whatever it makes computes what its basic operations compute.
#pragma once

#include <vector>

#include "ligature/fuser/registry.h"
#include "ligature/testing/options.h"
#include "ligature/testing/report.h"
#include "ligature/testing/subject.h"

namespace ligature::testing {

/// Applies a fusion to operations and compares it with the operations run one by one, over dtypes,
/// shapes, and choices of what needs gradients: outputs, extra outputs, all gradients. A
/// forward-only fusion runs with the unfused backward, and the contexts it leaves are compared too;
/// a backward-only one runs after the unfused forward; a joint one is compared as a pair.
///
/// With a recipe both compute in low precision. A fusion may quantize a value before the step that
/// its basic operations quantize it after, so results may differ as far as the formats round.
///
/// It also finds an output that shares memory with an input, arguments that are changed, state kept
/// on the fused operation, saved tensors that are missing or spoiled, gradients that are missing,
/// needless, or of a wrong dtype or shape. Example:
/// ```
/// Report report = check_fusion(
///     backward_activation_bias_rule(), Pass::Backward,
///     [](at::ScalarType dtype, at::Device device) -> OpList {
///       BiasOptions options(8);
///       options.dtype = dtype;
///       options.device = device;
///       return {Bias(options).ptr(), GELU().ptr()};
///     },
///     {{{2, 3, 8}}, {{5, 8}}});
/// EXPECT_TRUE(report) << report.text();
/// ```
Report check_fusion(const Fusion& fusion, Pass pass, const MakeSubject& make,
                    const std::vector<ExampleShapes>& shapes, CheckOptions options = {});
Report check_fusion(const Fusion& fusion, Pass pass, const MakeOps& make,
                    const std::vector<ExampleShapes>& shapes, CheckOptions options = {});

}  // namespace ligature::testing
