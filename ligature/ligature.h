// The whole of Ligature.
#pragma once

#include "ligature/fuser/fuser.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"
#include "ligature/ops/constant_scale.h"
#include "ligature/ops/dropout.h"
#include "ligature/ops/identity.h"
#include "ligature/ops/l2_normalization.h"
#include "ligature/ops/layer_norm.h"
#include "ligature/ops/linear.h"
#include "ligature/ops/make_extra_output.h"
#include "ligature/ops/reshape.h"
#include "ligature/ops/rms_norm.h"
#include "ligature/ops/scaled_activation.h"
#include "ligature/sequential.h"
