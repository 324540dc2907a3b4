// Tensor maps for TMA, encoded by the driver. The encoder is looked up at run time: nothing links against the driver
// library, so the extension loads on a machine without one.
#pragma once

#include <cuda.h>

#include "launch/arguments.h"

namespace moeopt {

// Boxes of 128 rows x 128 bytes, 128-byte swizzle, zeros outside. Host work only (about a microsecond).
CUtensorMap encode_tensor_map(const WeightView& view);

}  // namespace moeopt
