// Lets a struct be filled field by field, each by its name (bindings/from_python.h).
#pragma once

#include <tuple>

// Lists the fields of the struct it stands in. Their order means nothing.
#define MOEOPT_FIELDS(...)                                 \
  static constexpr const char* kFieldNames = #__VA_ARGS__; \
  auto fields() { return std::tie(__VA_ARGS__); }
