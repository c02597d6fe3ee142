// Which recipes the backends can compute, for whoever opens a stream.

#ifndef LMHEAD_SERVER_COMPUTE_RECIPE_SUPPORT_H_
#define LMHEAD_SERVER_COMPUTE_RECIPE_SUPPORT_H_

#include <string_view>

#include "proto/types/loss_recipe.h"

namespace lmhead {

// Name of the first field of `recipe` that no backend implements, for an UNIMPLEMENTED answer.
// Empty for every recipe: the backends compute all of LossRecipe.
constexpr std::string_view UnfinishedRecipeField(const LossRecipe& recipe) { return {}; }

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_RECIPE_SUPPORT_H_
