// Batch normalisation: cuDNN's, and the steps of nn.SyncBatchNorm, which the CPU has not. They
// compute in float32 or float64, as those of a GPU do.
#include <ATen/NativeFunctions.h>

#include "operations.h"

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {
void check_devices(const char* operation, const Tensor& first,
                   std::initializer_list<OptionalTensor> others) {
    for (const OptionalTensor& tensor : others) {
        if (tensor && tensor->defined() && tensor->device() != first.device()) {
            raise_device_mismatch(operation, "an argument", first.device(), tensor->device(),
                                  false);
        }
    }
}

bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

Tensor lower(const OptionalTensor& tensor) { return is_given(tensor) ? on_cpu(*tensor) : Tensor(); }

Tensor lower_wide(const Tensor& tensor) {
    return on_cpu(tensor).to(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Return a tensor of one number a channel, in a shape that fits N x C x ....
Tensor per_channel(const Tensor& tensor, const Tensor& images) {
    std::vector<int64_t> shape(images.dim(), 1);
    shape[1] = -1;
    return tensor.reshape(shape);
}

std::vector<int64_t> all_but_channels(const Tensor& images) {
    std::vector<int64_t> dims{0};
    for (int64_t dim = 2; dim < images.dim(); dim++) dims.push_back(dim);
    return dims;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
    double momentum, double eps) {
    check_devices("cudnn_batch_norm", input, {weight, bias, running_mean, running_var});
    const at::Device gpu = input.device();
    Computing computing(gpu);
    auto [output, mean, invstd] =
        at::native_batch_norm(lower_wide(input), lower(weight), lower(bias), lower(running_mean),
                              lower(running_var), training, momentum, eps);
    const Tensor reserve = at::empty({0}, input.options().dtype(at::kByte));
    return {copy_to_gpu(output.to(input.scalar_type()), gpu), copy_to_gpu(mean, gpu),
            copy_to_gpu(invstd, gpu), reserve};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& input, const Tensor& grad, const Tensor& weight,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& mean, const OptionalTensor& invstd, double eps, const Tensor&) {
    check_devices("cudnn_batch_norm_backward", input, {grad, weight, mean, invstd});
    const at::Device gpu = input.device();
    Computing computing(gpu);
    auto [input_grad, weight_grad, bias_grad] = at::native_batch_norm_backward(
        lower_wide(grad), lower_wide(input), lower(weight), lower(running_mean), lower(running_var),
        lower(mean), lower(invstd), true, eps, {true, true, true});
    return {copy_to_gpu(input_grad.to(input.scalar_type()), gpu), copy_to_gpu(weight_grad, gpu),
            copy_to_gpu(bias_grad, gpu)};
}

// ---- nn.SyncBatchNorm: the statistics of one rank, those of all, and their use

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
    const at::Device gpu = input.device();
    Computing computing(gpu);
    const Tensor images = lower_wide(input);
    const auto dims = all_but_channels(images);
    const Tensor invstd = images.var(dims, /*unbiased=*/false).add(eps).rsqrt();
    return {copy_to_gpu(images.mean(dims), gpu), copy_to_gpu(invstd, gpu)};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, double momentum,
    double eps, const Tensor& counts) {
    check_devices("batch_norm_gather_stats_with_counts", input,
                  {mean, invstd, running_mean, running_var, counts});
    const at::Device gpu = input.device();
    Computing computing(gpu);
    const Tensor means = on_cpu(mean);  // ranks x channels
    const Tensor variances = on_cpu(invstd).pow(-2).sub(eps);
    const Tensor count = on_cpu(counts).to(means.scalar_type()).reshape({-1, 1});
    const Tensor total = count.sum();
    const Tensor global_mean = (means * count).sum(0) / total;
    const Tensor squares = ((variances + (means - global_mean).square()) * count).sum(0);
    if (is_given(running_mean)) {
        on_cpu(*running_mean).lerp_(global_mean, momentum);
        on_cpu(*running_var).lerp_(squares / (total - 1), momentum);
    }
    const Tensor global_invstd = (squares / total + eps).rsqrt();
    return {copy_to_gpu(global_mean, gpu), copy_to_gpu(global_invstd, gpu)};
}

Tensor batch_norm_elemt(const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const Tensor& mean, const Tensor& invstd,
                        double) {
    check_devices("batch_norm_elemt", input, {weight, bias, mean, invstd});
    Computing computing(input.device());
    const Tensor images = lower_wide(input);
    Tensor output = images - per_channel(on_cpu(mean), images);
    output *= per_channel(on_cpu(invstd), images);
    if (is_given(weight)) output *= per_channel(on_cpu(*weight), images);
    if (is_given(bias)) output += per_channel(on_cpu(*bias), images);
    return copy_to_gpu(output.to(input.scalar_type()), input.device());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool, bool, bool) {
    check_devices("batch_norm_backward_reduce", input, {grad, mean, invstd, weight});
    const at::Device gpu = input.device();
    Computing computing(gpu);
    const Tensor images = lower_wide(input);
    const Tensor grads = lower_wide(grad);
    const Tensor centred = images - per_channel(on_cpu(mean), images);
    const auto dims = all_but_channels(images);
    const Tensor sum = grads.sum(dims);
    const Tensor dot = (grads * centred).sum(dims);
    return {copy_to_gpu(sum, gpu), copy_to_gpu(dot, gpu), copy_to_gpu(dot * on_cpu(invstd), gpu),
            copy_to_gpu(sum, gpu)};
}

Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                 const Tensor& invstd, const OptionalTensor& weight,
                                 const Tensor& sum, const Tensor& dot, const Tensor& count) {
    check_devices("batch_norm_backward_elemt", input,
                  {grad, mean, invstd, weight, sum, dot, count});
    Computing computing(input.device());
    const Tensor images = lower_wide(input);
    const Tensor total = on_cpu(count).sum();
    const Tensor scale = on_cpu(invstd);
    const Tensor slope = scale.square() * on_cpu(dot) / total;
    Tensor result = lower_wide(grad) - per_channel(on_cpu(sum) / total, images);
    result -= (images - per_channel(on_cpu(mean), images)) * per_channel(slope, images);
    result *= per_channel(scale, images);
    if (is_given(weight)) result *= per_channel(on_cpu(*weight), images);
    return copy_to_gpu(result.to(input.scalar_type()), input.device());
}
}  // namespace

void add_batch_norm(torch::Library& library) {
    library.impl("cudnn_batch_norm", TORCH_FN(cudnn_batch_norm));
    library.impl("cudnn_batch_norm_backward", TORCH_FN(cudnn_batch_norm_backward));
    library.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
    library.impl("batch_norm_gather_stats_with_counts",
                 TORCH_FN(batch_norm_gather_stats_with_counts));
    library.impl("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
    library.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
    library.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
}
