#include "ligature/testing/check_operation.h"

#include "ligature/testing/compare.h"
#include "ligature/testing/comparison.h"
#include "ligature/testing/direct.h"
#include "ligature/testing/numeric.h"
#include "ligature/testing/scope.h"

namespace ligature::testing {
namespace {

/// The formula as a forward, with copies of everything in float64.
Graph run_formula(const Reference& reference, const Subject& subject, const Data& data,
                  const Needs& needs, uint64_t seed) {
  Graph graph;
  const auto leaf = [&](const Tensor& t) {
    const bool floating = at::isFloatingType(t.scalar_type());
    Tensor copy = t.detach().to(floating ? at::kDouble : t.scalar_type(), false, /*copy=*/true,
                                at::MemoryFormat::Contiguous);
    if (floating) copy.set_requires_grad(has(needs, graph.leaves.size()));
    graph.leaves.push_back(copy);
    return copy;
  };
  const Tensor input = leaf(data.input);
  std::vector<Tensor> params, extras;
  for (const auto& of_op : subject.params) {
    for (const Tensor& param : of_op) params.push_back(leaf(param));
  }
  for (const Tensor& extra : data.extra_inputs) extras.push_back(leaf(extra));
  graph.given = graph.leaves;
  seed_device(data.input.device(), seed);
  graph.outputs = reference(input, params, extras);
  for (const Tensor& output : graph.outputs) {
    LIGATURE_CHECK_TYPE(output.defined(), "the reference returned no tensor");
  }
  return graph;
}

class OperationCheck {
 public:
  OperationCheck(const Subject& subject, const Reference& reference, const CheckOptions& options,
                 Dtypes dtypes, Report& report)
      : options_(options),
        dtypes_(dtypes),
        subject_(subject),
        where_(name_of(subject) + ", " + to_string(dtypes)),
        plans_(subject, {}),
        forward_([this](const Data& data, const Needs& needs) {
          return run_plan(plans_, subject_, data, needs, options_.seed);
        }),
        comparison_(report, options, subject, plans_.wiring(), dtypes,
                    {forward_,
                     [this, &reference](const Data& data, const Needs& needs) {
                       return run_formula(reference, subject_, data, needs, options_.seed);
                     },
                     true}) {}

  void run(const std::vector<ExampleShapes>& shapes) {
    comparison_.guarded(where_, [&] {
      for (const auto& example : shapes) {
        shapes_.push_back(
            complete_shapes(subject_, plans_.wiring(), example, dtypes_.input, *options_.device));
      }
      for (size_t i = 0; i < shapes_.size(); ++i) run_shape(i);
    });
  }

  /// Only by differences; the subject is in float64.
  void run_numerically(const std::vector<ExampleShapes>& shapes) {
    const std::string where = where_ + ", by differences";
    comparison_.guarded(where, [&] {
      for (size_t i = 0; i < shapes.size(); ++i) {
        const ExampleShapes shape =
            complete_shapes(subject_, plans_.wiring(), shapes[i], dtypes_.input, *options_.device);
        const Data data = comparison_.make_data(shape, Comparison::Layout::Plain, i);
        for (const auto& what : numeric_differences(forward_, data, comparison_.leaves(),
                                                    comparison_.all(), options_.tolerance)) {
          comparison_.fail(where_ + " " + to_string(shape), what);
        }
      }
    });
  }

 private:
  static std::string name_of(const Subject& subject) {
    return subject.ops.size() == 1 ? subject.ops[0]->name() : describe(subject.ops);
  }

  void run_shape(size_t index) {
    const std::string where = where_ + " " + to_string(shapes_[index]);
    const Needs& all = comparison_.all();
    const auto describe_all = where + ", " + describe_needs(all, comparison_.leaves());
    Data data;
    bool works = false;
    comparison_.guarded(where + ", the reference fails", [&] {
      data = comparison_.make_data(shapes_[index], Comparison::Layout::Plain, index);
      works = true;
    });
    if (!works) return;
    const size_t failures = comparison_.num_failures();
    for (const Needs& needs : patterns(all, options_.max_patterns, options_.seed + index)) {
      const std::string with = where + ", " + describe_needs(needs, comparison_.leaves());
      comparison_.guarded(with, [&] {
        comparison_.compare(with, data, needs);
        check_steps(with, data, needs);
      });
    }
    const auto checked = [&](const std::string& with, const auto& check) {
      comparison_.guarded(with, [&] { check(with); });
    };
    checked(where, [&](const std::string& w) { check_outputs(w, data); });
    checked(describe_all + ", strided", [&](const std::string& w) {
      comparison_.compare(
          w, comparison_.make_data(shapes_[index], Comparison::Layout::Strided, index), all);
    });
    if (comparison_.num_failures() > failures) return;  // they would only be repeated
    checked(describe_all, [&](const std::string& w) { comparison_.compare_narrower(w, data); });
    checked(describe_all, [&](const std::string& w) { comparison_.compare_twice(w, data); });
    checked(describe_all, [&](const std::string& w) {
      const Data other = comparison_.make_data(shapes_[(index + 1) % shapes_.size()],
                                               Comparison::Layout::Plain, index + 1000);
      comparison_.compare_interleaved(w, data, other);
    });
    checked(describe_all, [&](const std::string& w) { comparison_.compare_edited(w, data); });
  }

  /// The gradients of each step, and what its compute half keeps.
  void check_steps(const std::string& where, const Data& data, const Needs& needs) {
    const Call call = prepare_call(subject_, plans_.wiring(), data, needs).call;
    const size_t first =
        plan_gradients(call, plans_.wiring(), subject_.ops.size()).first_backward_op;
    DirectRun run(plans_.get(first), subject_, data, needs, options_.seed);
    run.before_step = [&](const PlanStep& step, const Value& input, ArgsList args) {
      check_kept(where, *step.op, input, args);
    };
    run.forward();
    run.backward();
    const Unneeded allowed = options_.may_give_unneeded ? Unneeded::Any : Unneeded::PassedOn;
    for (const auto& what : complaints(run, subject_, run.inputs, allowed)) {
      comparison_.fail(where, what);
    }
    for (const auto& what : run.overwritten) comparison_.fail(where, "backward changed " + what);
  }

  void check_kept(const std::string& where, FusibleOperation& op, const Value& input,
                  ArgsList args) {
    std::vector<ToSave> to_save;
    try {
      to_save = op.fuser_forward_compute(input, args).to_save;
    } catch (const std::exception& error) {
      if (options_.is_fatal && options_.is_fatal(error)) throw;
      return;  // the classic form: it has no compute half
    }
    std::vector<Tensor> arguments{input.dequantized()};
    for (const OpArgs& one : args) {
      arguments.insert(arguments.end(), one.params.begin(), one.params.end());
      arguments.insert(arguments.end(), one.extra_inputs.begin(), one.extra_inputs.end());
    }
    for (const ToSave& of_op : to_save) {
      for (size_t k = 0; k < of_op.tensors.size(); ++k) {
        for (const Tensor& argument : arguments) {
          if (!of_op.tensors[k].defined() ||
              !share_memory(of_op.tensors[k].dequantized(), argument)) {
            continue;
          }
          comparison_.fail(where,
                           "the compute half of its forward returned an argument (or a view "
                           "of one) as to_save tensor " +
                               std::to_string(k) + "; save it by name in the other half");
        }
      }
    }
  }

  /// Shapes and dtypes of the outputs, as `infer` tells them; without it, the input's dtype.
  void check_outputs(const std::string& where, const Data& data) {
    const Graph graph = forward_(data, 0);
    std::vector<std::optional<ValueMeta>> wanted(graph.outputs.size());
    if (subject_.ops.size() == 1) {
      std::vector<std::optional<ValueMeta>> extras;
      for (const Tensor& extra : data.extra_inputs) extras.emplace_back(ValueMeta::of(extra));
      const auto inferred =
          subject_.ops[0]->infer({ValueMeta::of(data.input), subject_.params[0], extras,
                                  subject_.training[0], options_.autocast});
      if (inferred) {
        wanted[0] = inferred->output;
        for (size_t k = 1; k < wanted.size() && k <= inferred->extra_outputs.size(); ++k) {
          wanted[k] = inferred->extra_outputs[k - 1];
        }
      }
    }
    const auto names = output_names(subject_, plans_.wiring());
    for (size_t k = 0; k < graph.outputs.size(); ++k) {
      const ValueMeta got = ValueMeta::of(graph.outputs[k]);
      if (wanted[k] && (got.sizes != wanted[k]->sizes || got.dtype != wanted[k]->dtype)) {
        comparison_.fail(where, names[k] + " is " + ligature::to_string(got) +
                                    ", its infer tells " + ligature::to_string(*wanted[k]));
      } else if (!wanted[k] && !options_.may_change_dtype && !options_.autocast &&
                 got.dtype != dtypes_.input && at::isFloatingType(got.dtype) &&
                 dtypes_.input == dtypes_.params) {
        comparison_.fail(where, names[k] + " has dtype " + dtype_name(got.dtype) + ", wanted " +
                                    dtype_name(dtypes_.input));
      }
    }
  }

  const CheckOptions& options_;
  Dtypes dtypes_;
  const Subject& subject_;
  std::string where_;
  Plans plans_;
  Forward forward_;
  Comparison comparison_;
  std::vector<ExampleShapes> shapes_;
};

}  // namespace

Report check_operation(const MakeSubject& make, const Reference& reference,
                       const std::vector<ExampleShapes>& shapes, CheckOptions given) {
  LIGATURE_CHECK(given.recipe == nullptr,
                 "a formula has no formats: an operation is checked without a recipe");
  const CheckOptions options = complete_options(std::move(given));
  LIGATURE_CHECK(!shapes.empty(), "a check needs at least one shape");
  Report report;
  CheckScope scope(options);
  const auto make_subject = [&](const Dtypes& dtypes) {
    Subject subject = make(dtypes.params, *options.device);
    if (options.randomize_parameters) randomize_parameters(subject, options.seed);
    return subject;
  };
  for (const Dtypes& dtypes : options.dtypes) {
    const Subject subject = make_subject(dtypes);
    OperationCheck(subject, reference, options, dtypes, report).run(shapes);
  }
  if (options.numeric && !options.autocast) {
    const Subject subject = make_subject(at::kDouble);
    OperationCheck(subject, reference, options, at::kDouble, report).run_numerically(shapes);
  }
  return report;
}

Report check_operation(const MakeOps& make, const Reference& reference,
                       const std::vector<ExampleShapes>& shapes, CheckOptions options) {
  return check_operation(MakeSubject([&](at::ScalarType dtype, at::Device device) {
                           return subject_of(make(dtype, device));
                         }),
                         reference, shapes, std::move(options));
}

}  // namespace ligature::testing
