// Errors: every failure names the operation, the argument, what was wanted and what was given.
// A bad value raises ValueError in Python, a wrong kind TypeError, an index out of range
// IndexError, a wrong state RuntimeError.
#pragma once

#include <c10/util/Exception.h>

#define LIGATURE_CHECK(cond, ...) TORCH_CHECK_VALUE(cond, __VA_ARGS__)
#define LIGATURE_CHECK_TYPE(cond, ...) TORCH_CHECK_TYPE(cond, __VA_ARGS__)
#define LIGATURE_CHECK_INDEX(cond, ...) TORCH_CHECK_INDEX(cond, __VA_ARGS__)
#define LIGATURE_CHECK_STATE(cond, ...) TORCH_CHECK(cond, __VA_ARGS__)
