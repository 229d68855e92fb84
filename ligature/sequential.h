// Sequential: a container like torch::nn::Sequential that groups neighbouring fusible operations
// into fusers and runs other modules as they are.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ligature/fuser/fuser.h"

namespace ligature {

/// Example:
/// ```
/// Sequential mlp(LayerNorm(256), Linear(256, 1024), SwiGLU(), Linear(512, 256));
/// Tensor y = mlp->forward(x);
/// ```
class SequentialImpl : public torch::nn::Module {
 public:
  SequentialImpl() : torch::nn::Module("Sequential") {}

  /// Holders (`Linear(4, 8)`) or shared pointers of modules.
  template <class First, class... Rest,
            class = std::enable_if_t<!std::is_base_of_v<SequentialImpl, std::decay_t<First>>>>
  explicit SequentialImpl(First&& first, Rest&&... rest) : SequentialImpl() {
    push_back(std::forward<First>(first));
    (push_back(std::forward<Rest>(rest)), ...);
  }

  /// Adds a module at the end. Any module with `Tensor forward(Tensor)` is taken.
  template <class M>
  void push_back(M&& module) {
    insert(size(), std::forward<M>(module));
  }
  template <class M>
  void insert(size_t index, M&& module) {
    insert_entry(index, make_entry(std::forward<M>(module)));
  }
  void erase(size_t index);
  template <class M>
  void replace(size_t index, M&& module) {
    Entry entry = make_entry(std::forward<M>(module));
    erase(index);
    insert_entry(index, std::move(entry));
  }
  void extend(const SequentialImpl& other);

  size_t size() const { return entries_.size(); }
  bool is_empty() const { return entries_.empty(); }
  const std::shared_ptr<torch::nn::Module>& operator[](size_t index) const;
  template <class M>
  M& at(size_t index) const {
    auto* module = (*this)[index]->template as<M>();
    LIGATURE_CHECK_TYPE(module != nullptr, "[Sequential] module ", index, " is a ",
                        (*this)[index]->name(), ", not of the class asked for");
    return *module;
  }

  /// For a run without extra outputs.
  Tensor forward(const Tensor& input);
  /// The output, then the extra outputs in order. `kwargs`: by index of the module.
  std::vector<Tensor> forward(const Tensor& input, const std::vector<Tensor>& extra_inputs,
                              const std::vector<std::pair<size_t, OpKwargs>>& kwargs = {});

  void set_recompute(Recompute recompute);
  Recompute recompute() const { return options_.recompute; }
  /// false: run every basic operation by itself.
  void set_fuse(bool fuse);
  /// Fusions that must fire, in one of its fusers at least; a call fails otherwise and says why.
  void set_strict(std::vector<std::string> fusions);
  const std::vector<std::string>& strict() const { return strict_; }

  /// What the last call did; throws before the first.
  Explanation explain();
  /// What a call with these arguments would do. The operations compute nothing, so tensors without
  /// memory (on the meta device) do as well; of other modules a copy is tried on zeros.
  Explanation explain(const Tensor& input, const std::vector<Tensor>& extra_inputs = {});

  size_t num_extra_inputs();
  size_t num_extra_outputs();
  /// The fusers, in order, made when first asked for.
  std::vector<std::shared_ptr<OperationFuser>> fusers();

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override { stream << "ligature::Sequential"; }
  /// What one of its operations cannot read leaves all of them as they were.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Entry {
    std::shared_ptr<torch::nn::Module> module;
    OpPtr op;                                                          // when it is fusible
    std::shared_ptr<SequentialImpl> nested;                            // when it is a Sequential
    std::function<Tensor(torch::nn::Module&, const Tensor&)> forward;  // otherwise
  };
  struct Group {
    std::shared_ptr<OperationFuser> fuser;
    size_t first = 0;  // entries it covers
    size_t count = 0;
  };

  template <class M>
  static auto as_pointer(M&& module) {
    if constexpr (torch::detail::is_module<std::decay_t<M>>::value) {
      return std::make_shared<std::decay_t<M>>(std::forward<M>(module));
    } else if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return std::forward<M>(module);
    }
  }
  template <class M>
  static Entry make_entry(M&& module) {
    auto pointer = as_pointer(std::forward<M>(module));
    using Impl = typename std::decay_t<decltype(pointer)>::element_type;
    LIGATURE_CHECK_TYPE(pointer != nullptr, "[Sequential] a module must not be null");
    Entry entry;
    entry.module = pointer;
    if constexpr (std::is_base_of_v<FusibleOperation, Impl>) {
      entry.op = pointer;
    } else if constexpr (std::is_same_v<SequentialImpl, Impl>) {
      entry.nested = pointer;
    } else {
      entry.forward = [](torch::nn::Module& self, const Tensor& x) {
        return Tensor(static_cast<Impl&>(self).forward(x));
      };
    }
    return entry;
  }

  void insert_entry(size_t index, Entry entry);
  void changed();
  /// Adds the parts of this container; returns the outputs, without memory.
  std::vector<Tensor> explain_parts(const std::string& name, const Tensor* input,
                                    std::vector<Tensor> extra_inputs, at::Device device,
                                    std::vector<ExplainedPart>& parts);
  std::vector<Tensor> run_groups(const Tensor& input, const std::vector<Tensor>& extra_inputs,
                                 const std::vector<std::pair<size_t, OpKwargs>>& kwargs);
  static void explain_in(torch::nn::Module& module, const std::string& name,
                         std::vector<ExplainedPart>& parts);
  friend Explanation explain(torch::nn::Module& model);
  const std::vector<Group>& groups();

  std::vector<Entry> entries_;
  std::vector<Group> groups_;
  bool grouped_ = false;
  FuserOptions options_;
  std::vector<std::string> strict_;
};
TORCH_MODULE(Sequential);

/// What the last call of every Sequential in a model did, by its place in the model.
Explanation explain(torch::nn::Module& model);

}  // namespace ligature
