// The module ligature._C.
#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "ligature/version.h"

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  m.doc() = "The C++ core of Ligature.";
  m.attr("__version__") = ligature::version();
  // Errors of torch and of Ligature become the Python exceptions that torch itself would raise.
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (python_error& e) {
      e.restore();
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    }
  });
  using namespace ligature::python;
  bind_config(m);
  bind_quantized(m);
  bind_recipes(m);
  bind_context(m);
  bind_operations(m);
  bind_recipe_state(m);
  bind_graph(m);
  bind_guests(m);
  bind_registry(m);
  bind_fuser(m);
  bind_odd_tensors(m);
  bind_compile(m);
  bind_explain(m);
  bind_testing(m);
  bind_storage(m);
  bind_routing(m);
  bind_distributed(m);
}
