// Fills C++ structs from Python dictionaries, every field by its name, none missing and none unknown; and back.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "launch/problem.h"

namespace moeopt {

// A pointer is given as its address, an enum as its number.
template <typename T>
void set_field(T& field, pybind11::handle value) {
  if constexpr (std::is_pointer_v<T>) {
    field = reinterpret_cast<T>(value.cast<uintptr_t>());
  } else if constexpr (std::is_enum_v<T>) {
    field = static_cast<T>(value.cast<int>());
  } else {
    field = value.cast<T>();
  }
}

// The names in "a, b, c" as Python strings, which live as long as the process.
inline std::vector<pybind11::handle> interned_names(const std::string& list) {
  std::vector<pybind11::handle> names;
  for (size_t begin = 0, end; begin < list.size(); begin = end + 2) {
    end = list.find(", ", begin);
    if (end == std::string::npos) end = list.size();
    names.push_back(PyUnicode_InternFromString(list.substr(begin, end - begin).c_str()));
  }
  return names;
}

// `what`: the argument, for messages. Throws TypeError.
template <typename Struct>
Struct from_python(const char* what, const pybind11::dict& given) {
  static const std::vector<pybind11::handle> names = interned_names(Struct::kFieldNames);
  const auto fail = [&](const char* problem, pybind11::handle name) {
    throw pybind11::type_error(std::string(what) + ": " + problem + " field '" + std::string(pybind11::str(name)) +
                               "'");
  };
  Struct result{};
  size_t next = 0;
  const auto fill = [&](auto& field) {
    const pybind11::handle name = names[next++];
    PyObject* const value = PyDict_GetItemWithError(given.ptr(), name.ptr());
    if (value == nullptr) fail("missing", name);
    set_field(field, value);
  };
  std::apply([&](auto&... field) { (fill(field), ...); }, result.fields());
  for (const auto& item : given) {
    if (given.size() == names.size()) break;
    if (std::none_of(names.begin(), names.end(), [&](pybind11::handle name) { return item.first.equal(name); })) {
      fail("unknown", item.first);
    }
  }
  return result;
}

// A pointer as its address, an enum as its number.
template <typename Struct>
pybind11::dict to_python(Struct value) {
  static const std::vector<pybind11::handle> names = interned_names(Struct::kFieldNames);
  pybind11::dict result;
  size_t next = 0;
  const auto store = [&](const auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_pointer_v<Field>) {
      result[names[next++]] = reinterpret_cast<uintptr_t>(field);
    } else if constexpr (std::is_enum_v<Field>) {
      result[names[next++]] = static_cast<int>(field);
    } else {
      result[names[next++]] = field;
    }
  };
  std::apply([&](const auto&... field) { (store(field), ...); }, value.fields());
  return result;
}

inline pybind11::dict layout_to_python(const CallLayout& call) {
  const auto convert = [](const auto& layout) {
    return pybind11::dict(pybind11::arg("bytes") = layout.bytes, pybind11::arg("launch") = to_python(layout.launch),
                          pybind11::arg("workspace") = to_python(layout.workspace));
  };
  return std::visit(convert, call);
}

// `router`: a dictionary, or None where ids and weights are given; `int4`: likewise for weights that are INT4.
inline Problem problem_from_python(const pybind11::dict& experts, const pybind11::object& router,
                                   const pybind11::object& int4) {
  return {from_python<FusedExpertsArgs>("experts", experts),
          router.is_none() ? RouterArgs{} : from_python<RouterArgs>("router", router),
          int4.is_none() ? Int4Args{} : from_python<Int4Args>("int4", int4)};
}

}  // namespace moeopt
