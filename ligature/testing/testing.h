// Checks of fusions and operations, for tests. Part of the library, not of `ligature/ligature.h`.
#pragma once

#include "ligature/testing/check_fusion.h"
#include "ligature/testing/check_operation.h"
#include "ligature/testing/examples.h"
