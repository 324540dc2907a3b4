# The CUDA part of _kernels, where an nvcc >= 12.4 is found; without one the module has CPU kernels only.
#
# nvcc is called through compile_cuda.py rather than CMake's CUDA language: the compiler's register and spill report
# is kept per file, and a machine without a CUDA toolkit needs no language check to fail over.
set(MOEOPT_CUDA_ARCHS "sm_90a" CACHE STRING "CUDA architectures, comma separated")
find_program(MOEOPT_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
set(MOEOPT_CUDA_REPORTS "")
set(MOEOPT_NVCC_VERSION "")
if(MOEOPT_NVCC)
  execute_process(COMMAND "${MOEOPT_NVCC}" --version OUTPUT_VARIABLE nvcc_text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" nvcc_match "${nvcc_text}")
  set(MOEOPT_NVCC_VERSION "${CMAKE_MATCH_1}")
  # The toolkit's folder as nvcc itself sees it: nvcc on PATH may be a link or a wrapper script.
  execute_process(COMMAND "${MOEOPT_NVCC}" --dryrun -x cu -c /dev/null -o /dev/null
                  OUTPUT_VARIABLE nvcc_dryrun ERROR_VARIABLE nvcc_dryrun)
  string(REGEX MATCH "TOP=([^\n]+)" nvcc_match "${nvcc_dryrun}")
  find_library(MOEOPT_CUDART NAMES cudart_static HINTS "${CMAKE_MATCH_1}/lib64" "${CMAKE_MATCH_1}/lib"
               "${CMAKE_MATCH_1}/targets/x86_64-linux/lib" NO_DEFAULT_PATH)
endif()

set(MOEOPT_CUDA_WHY_NOT "")
if(NOT MOEOPT_NVCC)
  set(MOEOPT_CUDA_WHY_NOT "no nvcc found")
elseif(MOEOPT_NVCC_VERSION VERSION_LESS 12.4)
  set(MOEOPT_CUDA_WHY_NOT "${MOEOPT_NVCC} is ${MOEOPT_NVCC_VERSION}, expected 12.4 or newer")
elseif(NOT MOEOPT_CUDART)
  set(MOEOPT_CUDA_WHY_NOT "libcudart_static.a not found beside ${MOEOPT_NVCC}")
endif()

if(MOEOPT_CUDA_WHY_NOT)
  message(STATUS "CUDA kernels: not built: ${MOEOPT_CUDA_WHY_NOT}")
else()
  message(STATUS "CUDA kernels: nvcc ${MOEOPT_NVCC_VERSION} for ${MOEOPT_CUDA_ARCHS}")
  file(GLOB_RECURSE cuda_headers CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/include/moeopt/*"
       "${CMAKE_CURRENT_SOURCE_DIR}/launch/*.h" "${CMAKE_CURRENT_SOURCE_DIR}/launch/*.cuh")
  foreach(name cuda_kernels direct_experts gate_topk grouped_experts grouped_gemm_sm90_bf16 grouped_gemm_sm90_fp8
               grouped_gemm_sm90_fp8_weights grouped_gemm_sm90_int4_weights grouped_gemm_sm90_mxfp4
               grouped_gemm_sm90_mxfp4_weights router skinny_gemm tensor_map)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o")
    set(report "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.json")
    add_custom_command(OUTPUT "${object}" "${report}"
      COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/cuda"
      COMMAND ${Python_EXECUTABLE} "${CMAKE_CURRENT_SOURCE_DIR}/compile_cuda.py" --nvcc "${MOEOPT_NVCC}"
              --archs "${MOEOPT_CUDA_ARCHS}" --host-compiler "${CMAKE_CXX_COMPILER}"
              --source "${CMAKE_CURRENT_SOURCE_DIR}/launch/${name}.cu" --object "${object}" --report "${report}"
      DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/launch/${name}.cu" "${CMAKE_CURRENT_SOURCE_DIR}/compile_cuda.py"
              ${cuda_headers}
      VERBATIM)
    target_sources(_kernels PRIVATE "${object}")
    set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
    list(APPEND MOEOPT_CUDA_REPORTS "${report}")
  endforeach()
  target_compile_definitions(_kernels PRIVATE MOEOPT_CUDA)
  # The static runtime finds the driver when the first CUDA call is made: the module imports on a machine without one.
  find_package(Threads REQUIRED)
  target_link_libraries(_kernels PRIVATE "${MOEOPT_CUDART}" Threads::Threads ${CMAKE_DL_LIBS} rt)
endif()
