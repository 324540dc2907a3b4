// What a torch tensor is, read in nanoseconds and without torch's headers: through the table of functions that its type
// hands to other packages, DLPack's exchange API. From Python one property takes as long as all of them from here.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "moeopt/fused_experts.h"

namespace moeopt {

// DLPack's DLTensor. Shape and strides belong to the tensor.
struct TensorView {
  char* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;

  bool on_cpu() const { return device_type == 1; }
  int64_t row_bytes() const { return strides[0] * dtype_bits / 8; }
  int64_t dtype() const {
    return static_cast<int64_t>(dtype_code) | static_cast<int64_t>(dtype_bits) << 8 |
           static_cast<int64_t>(dtype_lanes) << 16;
  }
  // Whether the dimensions from `first` on lie together, one behind the other.
  bool is_packed(int32_t first) const {
    int64_t stride = 1;
    for (int32_t n = num_dims - 1; n >= first; --n) {
      if (shape[n] > 1 && strides[n] != stride) return false;
      stride *= shape[n];
    }
    return true;
  }
  int64_t device() const { return static_cast<int64_t>(device_type) << 32 | device_id; }
};

// DLPack's dtype codes.
constexpr uint8_t kIntCode = 0, kFloatCode = 2, kBFloatCode = 4;

// False where it is none of activations.
inline bool dtype_of(const TensorView& view, DType* dtype) {
  if (view.dtype_code == kBFloatCode && view.dtype_bits == 16) return *dtype = DType::kBFloat16, true;
  if (view.dtype_code != kFloatCode || (view.dtype_bits != 16 && view.dtype_bits != 32)) return false;
  return *dtype = view.dtype_bits == 16 ? DType::kFloat16 : DType::kFloat32, true;
}

class TensorReader {
 public:
  // `type`: torch.Tensor. Throws ValueError where it has no such table, or one of another layout.
  explicit TensorReader(const pybind11::handle& type) : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
    const pybind11::object capsule = pybind11::getattr(type, "__dlpack_c_exchange_api__", pybind11::none());
    if (capsule.is_none()) throw pybind11::value_error("the type of tensors has no DLPack exchange API");
    const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw pybind11::error_already_set();
    if (api->major != kMajor || api->read == nullptr) {
      throw pybind11::value_error("the type of tensors has another DLPack exchange API");
    }
    read_ = api->read;
  }

  // False where `object` is no tensor, or one that lies nowhere.
  bool read(PyObject* object, TensorView* view) const {
    if (!PyObject_TypeCheck(object, type_)) return false;
    if (read_(object, view) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  static constexpr uint32_t kMajor = 1;
  // DLPack's DLPackExchangeAPI of this major version, as far as it is used.
  struct Api {
    uint32_t major, minor;
    const void* older;
    const void* allocate;
    const void* take;
    const void* give;
    int (*read)(void* object, TensorView* view);
  };

  PyTypeObject* type_;
  int (*read_)(void*, TensorView*);
};

}  // namespace moeopt
