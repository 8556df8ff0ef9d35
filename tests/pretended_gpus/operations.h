// How the files of PyTorch's operations get from a GPU's tensors to the CPU's and back.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

// Return a tensor of the CPU in the same memory.
at::Tensor on_cpu(const at::Tensor& tensor);

// Return a copy of a tensor of the CPU on a GPU.
at::Tensor copy_to_gpu(const at::Tensor& tensor, at::Device gpu);

// Raise what PyTorch raises if tensors are on several devices. ``is_elementwise`` chooses between
// the two texts that PyTorch has for it.
[[noreturn]] void raise_device_mismatch(const std::string& operation, const std::string& argument,
                                        at::Device expected, at::Device found, bool is_elementwise);

// While it lives, this thread computes for a GPU: after the collectives that its stream waits for,
// and without autograd and autocast, which have done their part already.
class Computing {
   public:
    explicit Computing(at::Device gpu);

   private:
    c10::cuda::CUDAGuard gpu_;
    at::AutoDispatchBelowADInplaceOrView no_autograd_;
    c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

// Use the kernels of batch_norm.cpp, which the CPU has not.
void add_batch_norm(torch::Library& library);
