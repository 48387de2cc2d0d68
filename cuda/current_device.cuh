// Makes `device` current, and what was current before it current again.
#ifndef MEMSERVE_CURRENT_DEVICE_CUH
#define MEMSERVE_CURRENT_DEVICE_CUH

#include <cuda_runtime.h>

class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        error_ = cudaGetDevice(&before_);
        if (error_ == cudaSuccess && before_ != device) {
            error_ = cudaSetDevice(device);
            changed_ = error_ == cudaSuccess;
        }
    }
    ~CurrentDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;
    cudaError_t error() const { return error_; }

  private:
    int before_ = 0;
    bool changed_ = false;
    cudaError_t error_ = cudaSuccess;
};

#endif
