// Every operation of PyTorch that computes on a GPU computes on the CPU instead, in the same
// memory. What PyTorch does on the host stays its own: allocation, views, copies to and from the
// GPU.
#include "operations.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <set>

#include "elementwise.h"  // run.py makes it from PyTorch's list of its operations

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

extern "C" void pretend_wait_before_work(cudaStream_t stream);  // runtime.cpp

namespace {
// These launch no kernel, so they are left to PyTorch.
const std::set<std::string> ON_THE_HOST{
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::_resize_output_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::_cudnn_init_dropout_state",
    "aten::is_pinned",
    "aten::_pin_memory",
};

// These may be given indices on the CPU, which PyTorch copies to the GPU.
const std::set<std::string> INDEXING{"aten::index", "aten::_unsafe_index", "aten::index_put",
                                     "aten::index_put_", "aten::_index_put_impl_"};

at::Device current_gpu() { return {at::kCUDA, c10::cuda::current_device()}; }

// ---- Random numbers

std::mutex random_mutex;

// A generator of the CPU for each of the GPU's, which remembers from where it has drawn.
struct Companion {
    at::Generator generator;
    uint64_t seed;
    uint64_t offset;
};

// Return the CPU's generator that draws for a GPU's: from the same seed, and on from where it is.
at::Generator companion_of(const at::Generator& given) {
    static std::map<void*, Companion> companions;
    auto* gpu_generator = at::check_generator<at::CUDAGeneratorImpl>(given);
    const uint64_t seed = gpu_generator->current_seed();
    const uint64_t offset = gpu_generator->philox_offset_per_thread();
    Companion& companion = companions[gpu_generator];
    const bool is_new = !companion.generator.defined();
    if (is_new) companion.generator = at::make_generator<at::CPUGeneratorImpl>();
    if (is_new || companion.seed != seed || companion.offset != offset) {
        companion.generator.set_current_seed(seed + offset);
    }
    companion.seed = seed;
    companion.offset = offset + 4;  // it has to be a multiple of 4
    gpu_generator->set_philox_offset_per_thread(companion.offset);
    return companion.generator;
}

// While it lives, the CPU's default generator draws for the GPU's, for operations that take none.
class DefaultGenerator {
   public:
    explicit DefaultGenerator(at::Device gpu)
        : lock_(random_mutex),
          companion_(companion_of(at::cuda::detail::getDefaultCUDAGenerator(gpu.index()))),
          saved_(cpu_.get_state()) {
        cpu_.set_state(companion_.get_state());
    }
    ~DefaultGenerator() {
        companion_.set_state(cpu_.get_state());
        cpu_.set_state(saved_);
    }

   private:
    std::lock_guard<std::mutex> lock_;
    at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
    at::Generator companion_;
    Tensor saved_;
};

// ---- One operation

// An argument that the operation writes to, and what stands for it on the CPU.
struct Written {
    size_t argument;
    IValue original;
    Tensor lowered;  // undefined if the argument is a list
};

class Call {
   public:
    Call(const c10::OperatorHandle& op, Stack& stack)
        : op_(op),
          name_(op.schema().operator_name().name),
          is_elementwise_(ELEMENTWISE.count(c10::toString(op.schema().operator_name())) > 0),
          is_indexing_(INDEXING.count(name_) > 0),
          stack_(stack),
          first_(stack.size() - op.schema().arguments().size()),
          gpu_(find_gpu()) {}

    void run() {
        Computing computing(gpu_);
        std::unique_lock lock(random_mutex, std::defer_lock);
        if (takes_generator()) lock.lock();
        lower_arguments();
        {
            std::optional<DefaultGenerator> draws;
            bool is_random = op_.hasTag(at::Tag::nondeterministic_seeded);
            if (is_random && !takes_generator()) draws.emplace(gpu_);
            compute();
        }
        update_written();
        lift_results();
    }

   private:
    const std::vector<c10::Argument>& arguments() const { return op_.schema().arguments(); }

    static bool is_written(const c10::Argument& argument) {
        return argument.alias_info() && argument.alias_info()->isWrite();
    }

    bool takes_generator() const {
        for (const c10::Argument& argument : arguments()) {
            if (argument.type()->str().find("Generator") != std::string::npos) return true;
        }
        return false;
    }

    // Return the GPU of the arguments. Raise an error if they are on several devices.
    at::Device find_gpu() const {
        std::optional<at::Device> gpu;
        std::vector<std::pair<Tensor, std::string>> of_cpu;
        auto look_at = [&](const IValue& value, const std::string& argument) {
            if (!value.isTensor() || !value.toTensor().defined()) return;
            const Tensor tensor = value.toTensor();
            if (!tensor.is_cuda()) {
                of_cpu.emplace_back(tensor, argument);
            } else if (!gpu) {
                gpu = tensor.device();
            } else if (*gpu != tensor.device()) {
                raise_device_mismatch(name_, argument, *gpu, tensor.device(), is_elementwise_);
            }
        };
        for (size_t index = 0; index < arguments().size(); index++) {
            const IValue& value = stack_[first_ + index];
            const std::string& argument = arguments()[index].name();
            look_at(value, argument);
            if (!value.isList()) continue;
            for (const IValue& element : value.toListRef()) look_at(element, argument);
        }
        for (size_t index = 0; index < arguments().size() && !gpu; index++) {
            const IValue& value = stack_[first_ + index];
            if (!value.isDevice() || !value.toDevice().is_cuda()) continue;
            gpu = value.toDevice().has_index() ? value.toDevice() : current_gpu();
        }
        if (!gpu) gpu = current_gpu();
        for (auto& [tensor, argument] : of_cpu) {
            if (is_indexing_ && argument == "indices") continue;
            if (is_elementwise_ && tensor.dim() == 0) continue;  // as good as a number
            raise_device_mismatch(name_, argument, *gpu, tensor.device(), is_elementwise_);
        }
        return *gpu;
    }

    Tensor lower(const Tensor& tensor) const {
        if (!tensor.defined()) return tensor;
        if (tensor.is_cuda()) return on_cpu(tensor);
        return is_indexing_ && tensor.dim() > 0 ? on_cpu(tensor.to(gpu_)) : tensor;
    }

    // Replace tensors, devices and generators of the GPU on the stack by the CPU's.
    void lower_arguments() {
        for (size_t index = 0; index < arguments().size(); index++) {
            IValue& value = stack_[first_ + index];
            const c10::Argument& argument = arguments()[index];
            if (argument.type()->str().find("Generator") != std::string::npos) {
                value = companion_of(value.isNone()
                                         ? at::cuda::detail::getDefaultCUDAGenerator(gpu_.index())
                                         : value.toGenerator());
            } else if (value.isDevice()) {
                if (value.toDevice().is_cuda()) value = at::Device(at::kCPU);
            } else if (value.isTensor()) {
                const Tensor original = value.toTensor();
                value = lower(original);
                if (is_written(argument)) written_.push_back({index, original, value.toTensor()});
            } else if (value.isTensorList()) {
                if (is_written(argument)) written_.push_back({index, value, Tensor()});
                c10::List<Tensor> lowered;
                for (const Tensor& tensor : value.toTensorVector()) {
                    lowered.push_back(lower(tensor));
                }
                value = lowered;
            } else if (value.isOptionalTensorList()) {
                c10::List<std::optional<Tensor>> lowered;
                for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
                    lowered.push_back(tensor ? std::optional(lower(*tensor)) : std::nullopt);
                }
                value = lowered;
            }
        }
    }

    void compute() {
        const Stack given(stack_.begin() + first_, stack_.end());
        try {
            op_.callBoxed(stack_);
        } catch (const c10::Error& error) {
            const std::string text = error.what_without_backtrace();
            if (text.find("not implemented for 'Half'") == std::string::npos) throw;
            compute_in_float(given);
        }
    }

    // The CPU has no kernel for float16. So compute in float32, which is how a GPU adds up.
    void compute_in_float(const Stack& given) {
        auto convert = [](IValue& value, at::ScalarType from, at::ScalarType to) {
            if (value.isTensor() && value.toTensor().defined() &&
                value.toTensor().scalar_type() == from) {
                value = value.toTensor().to(to);
            }
        };
        stack_.resize(first_);
        for (IValue value : given) {
            convert(value, at::kHalf, at::kFloat);
            stack_.push_back(value);
        }
        op_.callBoxed(stack_);
        for (size_t index = first_; index < stack_.size(); index++) {
            convert(stack_[index], at::kFloat, at::kHalf);
        }
    }

    // An operation that resizes an argument has moved it to other memory.
    void update_written() {
        for (auto& [index, original, lowered] : written_) {
            if (!lowered.defined() || !original.toTensor().is_cuda()) continue;
            const Tensor tensor = original.toTensor();
            const bool has_moved = lowered.numel() > 0 && lowered.data_ptr() != tensor.data_ptr();
            if (lowered.sizes() == tensor.sizes() && !has_moved) continue;
            tensor.resize_(lowered.sizes());
            on_cpu(tensor).copy_(lowered);
        }
    }

    // Replace the results on the stack by the arguments that were written to, or by copies.
    void lift_results() {
        const auto& returns = op_.schema().returns();
        const size_t first = stack_.size() - returns.size();
        for (size_t index = 0; index < returns.size(); index++) {
            IValue& value = stack_[first + index];
            if (is_written(returns[index])) {
                for (auto& [argument, original, lowered] : written_) {
                    const auto& names = arguments()[argument].alias_info()->beforeSets();
                    if (names == returns[index].alias_info()->beforeSets()) value = original;
                }
            } else if (value.isTensor()) {
                if (value.toTensor().defined()) value = copy_to_gpu(value.toTensor(), gpu_);
            } else if (value.isTensorList()) {
                c10::List<Tensor> lifted;
                for (const Tensor& tensor : value.toTensorVector()) {
                    lifted.push_back(copy_to_gpu(tensor, gpu_));
                }
                value = lifted;
            }
        }
    }

    const c10::OperatorHandle& op_;
    const std::string name_;
    const bool is_elementwise_;
    const bool is_indexing_;
    Stack& stack_;
    const size_t first_;
    const at::Device gpu_;
    std::vector<Written> written_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    Call(op, *stack).run();
}

// A copy on one GPU is a kernel. The others are PyTorch's, with the runtime's cudaMemcpyAsync.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    if (!self.is_cuda() || self.device() != source.device() || self.numel() == 0) {
        return at::native::copy_(self, source, non_blocking);
    }
    Computing computing(self.device());
    on_cpu(self).copy_(on_cpu(source));
    return self;
}

void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
    for (size_t index = 0; index < self.size(); index++) {
        Tensor tensor = self[index];
        copy_(tensor, source[index], non_blocking);
    }
}

bool is_view(const c10::FunctionSchema& schema) {
    for (const c10::Argument& result : schema.returns()) {
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    }
    return false;
}

// PyTorch warns that its kernels are replaced.
class Silence : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
};
}  // namespace

Tensor on_cpu(const Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU).pinned_memory(false);
    if (!tensor.has_storage() || tensor.numel() == 0) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copy_to_gpu(const Tensor& tensor, at::Device gpu) {
    auto options = tensor.options().device(gpu).pinned_memory(false);
    Tensor copy = tensor.is_non_overlapping_and_dense()
                      ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                      : at::empty(tensor.sizes(), options);
    if (tensor.numel() > 0) on_cpu(copy).copy_(tensor);
    return copy;
}

void raise_device_mismatch(const std::string& operation, const std::string& argument,
                           at::Device expected, at::Device found, bool is_elementwise) {
    TORCH_CHECK(!is_elementwise,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                expected, " and ", found, "!");
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument,
                " is on ", found, ", different from other tensors on ", expected,
                " (when checking argument in method wrapper_CUDA_", operation, ")");
}

Computing::Computing(at::Device gpu) : gpu_(gpu), no_autocast_(c10::autocast_dispatch_keyset) {
    pretend_wait_before_work(c10::cuda::getCurrentCUDAStream().stream());
}

// Replace the operations. Called once, after `import torch`.
extern "C" __attribute__((visibility("default"))) void pretend_operations() {
    Silence silence;
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__,
                                  __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        const std::string text = c10::toString(name);
        auto op = dispatcher.findSchema(name);
        if (text.rfind("aten::", 0) != 0 || !op) continue;
        if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) || is_view(op->schema())) continue;
        if (ON_THE_HOST.count(text) > 0) continue;
        library.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    // Its kernel for CUDA is the general one, which would look for a convolution of cuDNN's.
    library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    library.impl("copy_", TORCH_FN(copy_));
    library.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
    add_batch_norm(library);
}
