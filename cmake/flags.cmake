# Flags of every compile, and the compiler cache. Included before project().

# The cache, where there is one: a second build from nothing takes a tenth of the time.
find_program(LMHEAD_CCACHE ccache)
if(LMHEAD_CCACHE)
  foreach(language C CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${LMHEAD_CCACHE})
    endif()
  endforeach()
endif()

# Build type of the sanitizer presets: line numbers in reports, little else, so that building and linking stay quick.
set(CMAKE_C_FLAGS_SANITIZE "-O1 -g1" CACHE STRING "Flags of the Sanitize build type")
set(CMAKE_CXX_FLAGS_SANITIZE "-O1 -g1" CACHE STRING "Flags of the Sanitize build type")
