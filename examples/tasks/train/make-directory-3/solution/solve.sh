#!/bin/bash
mkdir coat
