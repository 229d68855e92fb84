#include "ligature/testing/check_fusion.h"

#include <algorithm>

#include "ligature/testing/comparison.h"
#include "ligature/testing/direct.h"
#include "ligature/testing/scope.h"

namespace ligature::testing {
namespace {

/// The checks of a fusion in one dtype: one set of operations, one instance of the fused operation
/// per plan.
class FusionCheck {
 public:
  FusionCheck(const Fusion& fusion, Pass pass, const Subject& subject, const CheckOptions& options,
              Dtypes dtypes, Report& report)
      : pass_(pass),
        options_(options),
        dtypes_(dtypes),
        subject_(subject),
        where_(fusion_name(fusion) + ", " + to_string(dtypes)),
        plain_(subject, plan_options()),
        fused_(subject, plan_options(), fusion, pass),
        comparison_(report, options, subject, plain_.wiring(), dtypes,
                    {runner(fused_), runner(plain_), false}) {}

  void run(const std::vector<ExampleShapes>& shapes) {
    comparison_.guarded(where_, [&] {
      if (!fires()) return;
      std::vector<ExampleShapes> complete;
      for (const auto& example : shapes) {
        complete.push_back(
            complete_shapes(subject_, plain_.wiring(), example, dtypes_.input, *options_.device));
      }
      for (size_t i = 0; i < complete.size(); ++i) run_shape(complete, i);
    });
  }

 private:
  PlanOptions plan_options() const {
    PlanOptions out;
    out.dtype = dtypes_.input;
    out.device = *options_.device;
    out.recipe = options_.recipe;
    out.recompute = options_.recompute;
    out.of_every_device = true;
    return out;
  }

  Forward runner(Plans& plans) {
    return [this, &plans](const Data& data, const Needs& needs) {
      return run_plan(plans, subject_, data, needs, options_.seed);
    };
  }

  bool fires() {
    if (fused_.get(0) != nullptr) return true;
    comparison_.fail(where_,
                     "it does not fire on " + describe(subject_.ops) + ": " + fused_.reason());
    return false;
  }

  size_t first_backward_op(const Data& data, const Needs& needs) {
    const Call call = prepare_call(subject_, plain_.wiring(), data, needs).call;
    return plan_gradients(call, plain_.wiring(), subject_.ops.size()).first_backward_op;
  }

  void run_shape(const std::vector<ExampleShapes>& shapes, size_t index) {
    const std::string where = where_ + " " + to_string(shapes[index]);
    const Needs& all = comparison_.all();
    const auto describe_all = ", " + describe_needs(all, comparison_.leaves());
    Data data;
    bool works = false;
    comparison_.guarded(where + ", the basic operations fail", [&] {
      data = comparison_.make_data(shapes[index], Comparison::Layout::Plain, index);
      works = true;
    });
    if (!works) return;
    const size_t failures = comparison_.num_failures();
    for (const Needs& needs : patterns(all, options_.max_patterns, options_.seed + index)) {
      run_pattern(where, data, needs);
    }
    comparison_.guarded(where + ", strided" + describe_all, [&] {
      comparison_.compare(where + ", strided" + describe_all,
                          comparison_.make_data(shapes[index], Comparison::Layout::Strided, index),
                          all);
    });
    if (comparison_.num_failures() > failures) return;  // they would only be repeated
    const auto hazard = [&](const auto& check) {
      comparison_.guarded(where + describe_all, [&] { check(where + describe_all); });
    };
    hazard([&](const std::string& w) { comparison_.compare_narrower(w, data); });
    hazard([&](const std::string& w) { comparison_.compare_twice(w, data); });
    hazard([&](const std::string& w) {
      const Data other = comparison_.make_data(shapes[(index + 1) % shapes.size()],
                                               Comparison::Layout::Plain, index + 1000);
      comparison_.compare_interleaved(w, data, other);
    });
    hazard([&](const std::string& w) { comparison_.compare_edited(w, data); });
  }

  void run_pattern(const std::string& shape, const Data& data, const Needs& needs) {
    const std::string where = shape + ", " + describe_needs(needs, comparison_.leaves());
    comparison_.guarded(where, [&] {
      const size_t first = first_backward_op(data, needs);
      if (fused_.get(first) == nullptr) return;
      DirectRun expected(plain_.get(first), subject_, data, needs, options_.seed);
      DirectRun actual(fused_.get(first), subject_, data, needs, options_.seed);
      expected.forward();
      actual.forward();
      if (pass_ == Pass::Forward) compare_contexts(where, actual, expected);
      comparison_.compare(where, data, needs);
      compare_steps(where, actual, expected);
    });
  }

  void compare_contexts(const std::string& where, const DirectRun& actual,
                        const DirectRun& expected) {
    for (const auto& what : context_differences(actual, expected, subject_, options_.contexts,
                                                comparison_.tolerance())) {
      comparison_.fail(where, what);
    }
  }

  /// The gradients of single steps, which autograd would cast, add up or drop.
  void compare_steps(const std::string& where, DirectRun& actual, DirectRun& expected) {
    expected.backward();
    actual.backward();
    // What the basic operations do, the fusion may do.
    const auto excused = complaints(expected, subject_, expected.inputs, Unneeded::None);
    const Unneeded allowed = options_.may_give_unneeded ? Unneeded::Any : Unneeded::PassedOn;
    for (const auto& what : complaints(actual, subject_, expected.inputs, allowed)) {
      if (std::find(excused.begin(), excused.end(), what) == excused.end()) {
        comparison_.fail(where, what);
      }
    }
    for (const auto& what : actual.overwritten) {
      comparison_.fail(where, "backward changed " + what);
    }
  }

  Pass pass_;
  const CheckOptions& options_;
  Dtypes dtypes_;
  const Subject& subject_;
  std::string where_;
  Plans plain_;
  Plans fused_;
  Comparison comparison_;
};

}  // namespace

Report check_fusion(const Fusion& fusion, Pass pass, const MakeSubject& make,
                    const std::vector<ExampleShapes>& shapes, CheckOptions given) {
  const CheckOptions options = complete_options(std::move(given));
  LIGATURE_CHECK(!shapes.empty(), "a check needs at least one shape");
  Report report;
  CheckScope scope(options);
  for (const Dtypes& dtypes : options.dtypes) {
    const Subject subject = make(dtypes.params, *options.device);
    if (options.randomize_parameters) randomize_parameters(subject, options.seed);
    FusionCheck(fusion, pass, subject, options, dtypes, report).run(shapes);
  }
  return report;
}

Report check_fusion(const Fusion& fusion, Pass pass, const MakeOps& make,
                    const std::vector<ExampleShapes>& shapes, CheckOptions options) {
  return check_fusion(fusion, pass, MakeSubject([&](at::ScalarType dtype, at::Device device) {
                        return subject_of(make(dtype, device));
                      }),
                      shapes, std::move(options));
}

}  // namespace ligature::testing
